"""One step of a wrapped optimizer: scale, test, unscale, clip, update or skip."""
