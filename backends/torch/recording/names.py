"""Names for the leaves of a step, from its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn


def names_of(modules: Iterable[nn.Module], leaves: Sequence[Tensor]) -> dict[Tensor, str]:
    """Return names for leaves, in the order of the modules' parameters; other leaves follow, by number and shape.

    >>> one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> list(names_of([one], [one.bias, one.weight, other.weight]).values())
    ['weight', 'bias', 'parameter 0 of shape (1, 1)']
    >>> list(names_of([one, other], [one.weight, other.weight]).values())
    ['Linear.weight', 'Linear_1.weight']
    """
    wanted, named = set(leaves), dict[Tensor, tuple[str, str]]()
    for prefix, root in _prefixes(modules):
        for name, param in root.named_parameters():
            if param in wanted:
                named.setdefault(param, (prefix, name.removeprefix("_orig_mod.")))
    shared = Counter(name for _, name in named.values())
    known = {param: f"{prefix}.{name}" if shared[name] > 1 else name for param, (prefix, name) in named.items()}
    others = [leaf for leaf in leaves if leaf not in known]
    return known | {leaf: f"parameter {place} of shape {tuple(leaf.shape)}" for place, leaf in enumerate(others)}


def _prefixes(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not parts of others, each with the name of its class, made unique."""
    found = list(dict.fromkeys(modules))
    inner = {part for module in found for part in module.modules() if part is not module}
    count: Counter[str] = Counter()
    for module in found:
        if module not in inner:
            kind = type(module).__name__
            yield (f"{kind}_{count[kind]}" if count[kind] else kind), module
            count[kind] += 1
