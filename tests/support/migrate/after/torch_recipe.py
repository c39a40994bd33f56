"""The recipe of torch.amp: clipping, a schedule that waits for applied steps, and a checkpoint."""

import torch
from sklearn.datasets import load_digits
import polyamp

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
opt = polyamp.wrap_optimizer(opt, "mixed_float16" if use_amp else "float32")

losses, norms = [], []
for epoch in range(4):
    for input, target in zip(images, labels):
        with polyamp.autocast("mixed_float16" if use_amp else "float32"):
            output = net(input)
            loss = loss_fn(output, target)
        opt.backward(loss)  # scaled gradients
        norm = opt.clip_grad_norm_(1.0)
        scale = opt.loss_scale
        opt.step()
        if scale <= opt.loss_scale:
            schedule.step()
        opt.zero_grad()  # set_to_none=True here can modestly improve performance
        losses.append(loss.item())
        norms.append(norm.item())

checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": polyamp.save_loss_scale(opt)}
final_scale = opt.loss_scale
