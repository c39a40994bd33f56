"""The recipe of torch.cuda.amp, with mixed precision of its own."""

import digits
import torch
from torch.cuda.amp import GradScaler, autocast

model = digits.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler()
losses = []
for x, y in digits.batches(5):
    optimizer.zero_grad()
    with autocast():
        loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
digits.save(losses)
