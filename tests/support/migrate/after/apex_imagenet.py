"""The loop of Apex' ImageNet example: O2, a static loss scale, fused SGD, data parallelism if there are processes."""

import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

import polyamp


def main(args):
    digits = load_digits()
    images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
    labels = torch.tensor(digits.target[:256]).split(64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    if args.sync_bn:
        print("using apex synced BN")
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)

    # Initialize Amp.
    model = polyamp.convert(model, "O2")
    optimizer = polyamp.wrap_optimizer(optimizer, "O2", loss_scale=128.0)
    # For distributed training, wrap the model with apex.parallel.DistributedDataParallel.
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)

    return [train(zip(images, labels), model, criterion, optimizer, epoch) for epoch in range(4)]


def train(train_loader, model, criterion, optimizer, epoch):
    model.train()
    total = 0.0
    for i, (input, target) in enumerate(train_loader):
        # compute output
        output = model(input)
        loss = criterion(output, target)

        # compute gradient and do SGD step
        optimizer.zero_grad()

        optimizer.backward(loss)
        optimizer.step()
        total += loss.item() / 4
    return total


parser = argparse.ArgumentParser()
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=1e-4, type=float)
parser.add_argument("--sync_bn", action="store_true")
parser.add_argument("--distributed", action="store_true")
losses = main(parser.parse_args([]))
