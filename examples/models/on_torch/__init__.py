"""Models of the founding tables in PyTorch."""
