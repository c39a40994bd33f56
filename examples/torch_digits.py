"""Handwritten digits in PyTorch: one loop, three precision policies."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import polyamp

STEPS, BATCH, TRAIN = 200, 64, 1437


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train(name: str) -> tuple[float, float, float, int]:
    policy = polyamp.policy(name)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = make_model()
    opt = polyamp.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), policy, max_grad_norm=1.0)
    skipped = 0
    for _ in range(STEPS):
        batch = torch.randint(TRAIN, (BATCH,))
        with polyamp.autocast(policy):
            loss = cross_entropy(model(images[batch]).float(), labels[batch])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        skipped += not opt.last_step
    with torch.no_grad(), polyamp.autocast(policy):
        accuracy = (model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
    return accuracy.item(), loss.item(), opt.loss_scale, skipped


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        accuracy, loss, scale, skipped = train(name)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{scale:>10g}{skipped:>9}")
