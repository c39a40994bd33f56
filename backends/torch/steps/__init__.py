"""The optimizer step: scale, unscale, test, clip, update or skip, and what is saved and reported about it."""
