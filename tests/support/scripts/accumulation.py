"""Accumulate four batches, clip, log the norm, decay the learning rate; gradients are looked at on the way."""

import digits
import torch

model = digits.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
optimizer.step()  # before any backward pass: does nothing
losses, norms = [], []
for index, (x, y) in enumerate(digits.batches(24)):
    loss = torch.nn.functional.cross_entropy(model(x), y) / 4
    loss.backward()
    losses.append(loss.item())
    norms.append(model[0].weight.grad.norm().item())
    if index % 4 == 3:
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=False)
digits.save(losses, norms=norms, lr=scheduler.get_last_lr())
