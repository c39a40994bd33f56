"""Apex, at the path that programs import; see ``compat/apex.py``."""

from polyamp.backends.torch.compat.apex import TABLE, Missing, amp, modules

__all__ = ["TABLE", "Missing", "amp", "modules"]
