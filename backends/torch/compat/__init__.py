"""Other libraries' interfaces on polyamp: Apex, `torch.cuda.amp`, `GradScaler`, and optimizers that stay one object.

Each is a face of the same loss scale and step. The public paths are `polyamp.backends.torch.apex`, `cuda_amp` and
`GradScaler`.
"""
