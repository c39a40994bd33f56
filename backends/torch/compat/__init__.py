"""Interfaces that PyTorch and Apex removed or deprecated, on polyamp's optimizer and autocast."""
