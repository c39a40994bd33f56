"""A scaler in an attribute, with two optimizers, and a decorated function: imports by alias."""

import torch
import torch.cuda.amp as amp
from sklearn.datasets import load_digits
from torch.amp import GradScaler

digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
labels = torch.tensor(digits.target[:256]).split(64)


class Trainer:
    def __init__(self, fp16=True):
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
        self.head = torch.nn.Linear(32, 10)
        self.optimizers = [
            torch.optim.SGD(self.body.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9),
        ]
        self.scaler = GradScaler("cpu", init_scale=2.0**12, enabled=fp16)

    @torch.autocast("cpu", dtype=torch.float16)
    def loss(self, x, y):
        with amp.autocast(enabled=False):
            x = x * 2 - 1
        return torch.nn.functional.cross_entropy(self.head(self.body(x)), y)

    def step(self, x, y):
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return loss.item()


trainer = Trainer()
losses = [trainer.step(x, y) for _ in range(4) for x, y in zip(images, labels)]
final_scale = trainer.scaler.get_scale()
