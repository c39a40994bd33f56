"""One training step, tensor by tensor: what `polyamp.probe`, `polyamp.diagnose` and `polyamp.lint` ask of PyTorch."""
