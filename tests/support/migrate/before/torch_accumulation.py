"""nanoGPT's loop: a dtype by name, accumulation, and a scaler that float16 alone needs."""
import os
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits

dtype = os.environ.get('DTYPE', 'float16') # 'float32', 'bfloat16', or 'float16', the latter will auto implement a GradScaler
gradient_accumulation_steps = 2
grad_clip = 1.0
device_type = 'cpu'
ptdtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[dtype]
ctx = nullcontext() if dtype == 'float32' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

digits = load_digits()
images = torch.tensor(digits.data[:256] / 16, dtype=torch.float32).split(32)
labels = torch.tensor(digits.target[:256]).split(32)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))

# initialize a GradScaler. If enabled=False scaler is a no-op
scaler = torch.amp.GradScaler('cpu', enabled=(dtype == 'float16'))

# optimizer
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

losses = []
iter_num = 0
while True:
    # forward backward update, with optional gradient accumulation to simulate larger batch size
    for micro_step in range(gradient_accumulation_steps):
        index = (iter_num * gradient_accumulation_steps + micro_step) % len(images)
        with ctx:
            logits = model(images[index])
            loss = torch.nn.functional.cross_entropy(logits, labels[index])
            loss = loss / gradient_accumulation_steps # scale the loss to account for gradient accumulation
        # backward pass, with gradient scaling if training in fp16
        scaler.scale(loss).backward()
    # clip the gradient
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    # step the optimizer and scaler if training in fp16
    scaler.step(optimizer)
    scaler.update()
    # flush the gradients as soon as we can, no need for this memory anymore
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * gradient_accumulation_steps)
    iter_num += 1
    if iter_num > 12:
        break
