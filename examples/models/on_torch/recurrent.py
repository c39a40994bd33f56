"""Run an LSTM written with linear layers: PyTorch's own one has no float16 kernel on a CPU.

>>> layer = LSTM(inputs=12, cells=32, projection=8)
>>> layer(torch.randn(4, 10, 12)).shape
torch.Size([4, 10, 8])
"""

import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """One layer, from (rows, time, inputs) to (rows, time, outputs), that starts from zeros.

    Args:
        inputs: numbers of an input.
        cells: numbers of a cell's state, and of an output.
        projection: numbers of an output, where it is projected (Sak et al., 2014); 0 means that it is not.
    """

    def __init__(self, inputs: int, cells: int, projection: int = 0) -> None:
        super().__init__()
        self.cells, self.outputs = cells, projection or cells
        self.gates = nn.Linear(inputs + self.outputs, 4 * cells)
        self.projection = nn.Linear(cells, projection, bias=False) if projection else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        cell, state = x.new_zeros(len(x), self.cells), x.new_zeros(len(x), self.outputs)
        states = []
        for value in x.unbind(1):
            taken, kept, shown, new = self.gates(torch.cat([value, state], 1)).chunk(4, 1)
            cell = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
            state = self.projection(shown.sigmoid() * cell.tanh())
            states.append(state)
        return torch.stack(states, 1)
