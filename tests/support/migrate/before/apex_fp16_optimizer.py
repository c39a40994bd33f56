"""The interface before amp: a model in half precision, and FP16_Optimizer around its optimizer."""

import torch
from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.normalization import FusedLayerNorm as LayerNorm
from apex.optimizers import FusedAdam
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
labels = torch.tensor(digits.target[:256]).split(64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), LayerNorm(32), torch.nn.Linear(32, 10))
model = network_to_half(model)
optimizer = FusedAdam(model.parameters(), lr=1e-2)
optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)

losses = []
for epoch in range(4):
    for x, y in zip(images, labels):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss, update_master_grads=False)
        optimizer.update_master_grads()
        optimizer.clip_master_grads(5.0)
        optimizer.step()
        losses.append(loss.item())
