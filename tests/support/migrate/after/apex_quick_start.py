"""Apex' quick start, with its imports and names."""
from __future__ import annotations

import torch
import polyamp
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
labels = torch.tensor(digits.target[:256]).split(64)
torch.manual_seed(0)

# Declare model and optimizer as usual, with default (FP32) precision
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# Allow Amp to perform casts as required by the opt_level
optimizer = polyamp.wrap_optimizer(optimizer, "O1")

losses = []
for epoch in range(4):
    for data, target in zip(images, labels):
        optimizer.zero_grad()
        with polyamp.autocast("O1"):
            output = model(data)
            loss = torch.nn.functional.cross_entropy(output, target)
        losses.append(loss.item())
        # loss.backward() becomes:
        optimizer.backward(loss)
        optimizer.step()
