"""The recipe of torch.amp: clipping, a schedule that waits for applied steps, and a checkpoint."""

import torch
from sklearn.datasets import load_digits

digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(64)
labels = torch.tensor(digits.target[:256]).split(64)
device = "cpu"
use_amp = True

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(opt, 8, 0.5)
loss_fn = torch.nn.CrossEntropyLoss()
# Creates a GradScaler once at the beginning of training.
scaler = torch.amp.GradScaler("cpu", enabled=use_amp)

losses, norms = [], []
for epoch in range(4):
    for input, target in zip(images, labels):
        with torch.autocast(device_type="cpu", dtype=torch.float16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()  # scaled gradients

        # Unscales the gradients of optimizer's assigned params in-place
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scale = scaler.get_scale()
        scaler.step(opt)
        # Updates the scale for next iteration.
        scaler.update()
        if scale <= scaler.get_scale():
            schedule.step()
        opt.zero_grad()  # set_to_none=True here can modestly improve performance
        losses.append(loss.item())
        norms.append(norm.item())

checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
final_scale = scaler.get_scale()
