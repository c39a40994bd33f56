"""One training step, tensor by tensor: PyTorch's part of `polyamp.probe`, `polyamp.diagnose` and `polyamp.lint`."""
