"""The operators of a loss-scaled step, ``torch.ops.polyamp``: their arithmetic, and how their numbers are packed."""
