"""What the scripts share: a local module, as scripts have one. Data, a small model, and losses in a file."""

import json
import sys

import torch
from sklearn.datasets import load_digits


def batches(count, size=64):
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return [(x[at : at + size], y[at : at + size]) for at in range(0, count * size, size)]


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def save(losses, **others):
    with open(sys.argv[1], "w") as file:
        json.dump({"losses": losses, **others}, file)
