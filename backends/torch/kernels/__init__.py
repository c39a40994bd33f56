"""The operators of a loss-scaled step, ``torch.ops.polyamp``: what they compute, and how their numbers are packed."""
