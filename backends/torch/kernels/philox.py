"""Random bits that depend only on a key and a position: Philox4x32-10, in tensors."""

from __future__ import annotations

import torch
from torch import Tensor

# Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011: the multipliers of the four
# words, the increments of the key after each round, and the number of rounds.
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return four random words for every counter."""
    one, two, three, four = counter
    low, high = key
    for _ in range(_ROUNDS):
        # Products wrap at 64 bits, including the sign, and every bit that is used stays correct.
        first, second = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, two = (second >> 32) & _WORD ^ two ^ low, second & _WORD
        three, four = (first >> 32) & _WORD ^ four ^ high, first & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return [one, two, three, four]


def random_bits(elements: int, tensor: int, seed: int, draws: Tensor) -> Tensor:
    """Return 16 random bits for every element of a tensor, the same on every device and in any order of work."""
    places = torch.arange(-(-elements // 8), dtype=torch.int64, device=draws.device)
    zero = torch.zeros((), dtype=torch.int64, device=draws.device)
    words = philox((places & _WORD, places >> 32, zero + tensor, zero), (zero + seed, draws.long() & _WORD))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).flatten()[:elements]
