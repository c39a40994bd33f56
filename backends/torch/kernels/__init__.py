"""The step's operators: their schema, their PyTorch reference, and the compiled extension that takes its place."""
