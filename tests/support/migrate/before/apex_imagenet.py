"""The loop of Apex' ImageNet example: O2, a static loss scale, fused SGD, data parallelism if there are processes."""

import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits

try:
    from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
    from apex import amp
    from apex.optimizers import FusedSGD
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")


def main(args):
    digits = load_digits()
    images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
    labels = torch.tensor(digits.target[:256]).split(64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    if args.sync_bn:
        print("using apex synced BN")
        model = convert_syncbn_model(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = FusedSGD(model.parameters(), args.lr,
                         momentum=args.momentum,
                         weight_decay=args.weight_decay)

    # Initialize Amp.
    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level="O2",
                                      keep_batchnorm_fp32=True,
                                      loss_scale=128.0
                                      )
    # For distributed training, wrap the model with apex.parallel.DistributedDataParallel.
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

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

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
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
