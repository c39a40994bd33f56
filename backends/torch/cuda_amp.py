"""The removed ``torch.cuda.amp``, at the path that programs import; see ``compat/cuda_amp.py``."""

from polyamp.backends.torch.compat.cuda_amp import GradScaler, OptState, autocast, custom_bwd, custom_fwd

__all__ = ["GradScaler", "OptState", "autocast", "custom_bwd", "custom_fwd"]
