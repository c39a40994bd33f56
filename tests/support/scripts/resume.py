"""Save a checkpoint in the middle of training, and go on from it with new objects."""

import os

import digits
import torch


def objects():
    model = digits.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)


def train(model, optimizer, scheduler, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss.item()


all_batches, file = digits.batches(16), os.environ["CHECKPOINT"]
first = objects()
losses = list(train(*first, all_batches[:8]))
torch.save({name: one.state_dict() for name, one in zip("mos", first, strict=True)}, file)
losses += list(train(*first, all_batches[8:]))
second = objects()
saved = torch.load(file)
for name, one in zip("mos", second, strict=True):
    one.load_state_dict(saved[name])
resumed = list(train(*second, all_batches[8:]))
digits.save(losses, same=resumed == losses[8:])
