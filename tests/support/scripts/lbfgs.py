"""Fit with LBFGS, whose step evaluates a closure several times."""

import digits
import torch

model = digits.model()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x, y = digits.batches(1, 256)[0]
losses = []


def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


for _ in range(6):
    losses.append(optimizer.step(closure).item())
digits.save(losses)
