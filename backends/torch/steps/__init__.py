"""The optimizer step: scale, unscale, test, clip, update or skip, and what is kept and said of it."""
