"""The interface before amp: a model in half precision, and FP16_Optimizer around its optimizer."""

import torch
import polyamp
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
labels = torch.tensor(digits.target[:256]).split(64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 10))
model = polyamp.convert(model, "O2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
optimizer = polyamp.wrap_optimizer(optimizer, "O2", loss_scale=128.0)

losses = []
for epoch in range(4):
    for x, y in zip(images, labels):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.unscale_()
        optimizer.clip_grad_norm_(5.0)
        optimizer.step()
        losses.append(loss.item())
