"""Handwritten digits in PyTorch: one loop, three precision policies. `polyamp demo` runs it beside the others."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import polyamp

STEPS, BATCH, TRAIN, RATE = 300, 64, 1437, 0.05


def make_model() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    rng = np.random.default_rng(0)  # the same weights in every framework: (height, width, inputs, outputs)
    for place, shape in {0: (3, 3, 1, 16), 3: (3, 3, 16, 32), 7: (2, 2, 32, 10)}.items():
        weight = rng.normal(0, np.sqrt(2 / np.prod(shape[:3])), shape).astype("float32")
        model[place].weight.data = torch.tensor(weight.transpose(3, 2, 0, 1)).reshape(model[place].weight.shape)
        nn.init.zeros_(model[place].bias)
    return model


def train(policy, steps=STEPS, report=lambda loss, step: None) -> dict[str, float]:
    """Train, and call `report` with the loss and the `StepResult` of every step."""
    torch.set_num_threads(1)  # for images this small, more threads only wait for each other
    digits = load_digits()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    model = make_model().to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    opt = polyamp.wrap_optimizer(sgd, policy, max_grad_norm=1.0)
    for batch in np.random.default_rng(1).integers(TRAIN, size=(steps, BATCH)):
        with polyamp.autocast(policy, backend="torch"):
            loss = cross_entropy(model(images[batch]), labels[batch])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        report(loss.item(), opt.last_step)
    with torch.no_grad(), polyamp.autocast(policy, backend="torch"):
        accuracy = (model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
        outputs = [hidden := images[batch]]
        outputs += [hidden := layer(hidden) for layer in model]
    del outputs[0], outputs[-2]  # the images, and what is only flattened
    return {
        "accuracy": accuracy.item(),
        "parameter_bytes": sum(param.nbytes for param in model.parameters()),
        "activation_bytes": sum(output.nbytes for output in outputs),
    }


if __name__ == "__main__":
    print(f"{'policy':<16}{'accuracy':>10}{'loss':>10}{'scale':>10}{'skipped':>9}")
    steps = []
    for name in ("float32", "mixed_bfloat16", "mixed_float16"):
        steps.clear()
        accuracy = train(polyamp.policy(name), report=lambda *step: steps.append(step))["accuracy"]
        (loss, last), skipped = steps[-1], sum(not step for _, step in steps)
        print(f"{name:<16}{accuracy:>10.2%}{loss:>10.4f}{last.scale:>10g}{skipped:>9}")
