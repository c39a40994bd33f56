"""The canonical operations and their classes."""
from typing import NamedTuple
class Operation(NamedTuple):
    op_class: str
    sources: tuple[str, ...]
    why: str = ""
OPERATIONS = {"softmax": Operation("full", ()), "matmul": Operation("lower", ()), "batch_norm": Operation("full", ())}
