"""``python -m polyamp.backends.torch.build``: compiles the extension, and prints where it is.

For a PyTorch without CUDA it compiles for the CPU. Exit codes: 0, everything is built; 1, not built; 2, wrong options.
"""

from __future__ import annotations

import argparse
import sys

from polyamp.backends.torch import extension
from polyamp.errors import PolyampError


def main() -> None:
    """Build both libraries; print polyamp's own errors without a traceback."""
    description = "Compile the extension for PyTorch. TORCH_CUDA_ARCH_LIST names other GPUs than those of this machine."
    parser = argparse.ArgumentParser(prog=extension.COMMAND, description=description)
    parser.add_argument("--force", action="store_true", help="build also what is there already, or has failed before")
    force = parser.parse_args().force
    try:
        for name in extension.LIBRARIES:
            print(extension.build(name, force=force))
    except PolyampError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
