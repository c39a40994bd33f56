"""Every kernel once, on tiny tensors, for NVIDIA's tool.

PYTHONPATH=tests compute-sanitizer python tests/on_torch/kernels/sanitized.py
"""

from __future__ import annotations

import math
from typing import Any

import torch

from support.torch_steps import COVERED, Way, network, train, wrapped

SIZES = (1, 7, 8, 9, 0, 1031)
KINDS: list[tuple[torch.dtype, Any]] = [
    (torch.float32, None),
    (torch.float16, True),
    (torch.bfloat16, True),
]


def unaligned(dtype: torch.dtype) -> torch.nn.Module:
    """Tensors of sizes that do not fill vectors, one of them one element off its alignment."""
    made = [torch.randn(size, device="cuda").to(dtype) for size in SIZES]
    made.append(torch.randn(42, device="cuda").to(dtype)[1:])
    return torch.nn.ParameterList(made)


def loss_of(model: Any, step: int) -> torch.Tensor:
    return sum(((param.float() + step).sin().sum() for param in model), torch.zeros((), device="cuda"))


def main() -> None:
    for dtype, storage in KINDS:
        for name in ("adamw", "sgd", "momentum"):
            model = unaligned(dtype)
            opt = wrapped(COVERED[name](model.parameters()), True, max_grad_norm=1.0, master_weights=storage)
            train(Way(model, opt), range(3), overflows={}, loss=loss_of)
            model[0].grad.fill_(math.nan)
            opt.scale(loss_of(model, 0))
            opt.step()
    model = network("cuda")
    opt = wrapped(torch.optim.Adagrad(model.parameters(), lr=0.1), True, max_grad_norm=0.1)
    train(Way(model, opt), range(2), overflows={1: math.inf})
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
