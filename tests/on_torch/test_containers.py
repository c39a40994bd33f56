"""Containers that models take and return, cast to other formats: every kind keeps its type."""

import dataclasses
import io
import pickle
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import polyamp
from polyamp.backends.torch import cast

Pair = namedtuple("Pair", "first second")


class Output(OrderedDict):
    """A dict with attributes that refuses to be updated, as the outputs of Hugging Face's models."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("update is refused")


class Encoding(UserDict):
    """As the encodings of tokenizers."""


class Frozen(Mapping):
    """A mapping that nothing can be put into."""

    def __init__(self, given: Any) -> None:
        self._given = dict(given)

    def __getitem__(self, key: str) -> Any:
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


class Stack(list):
    """A list with an attribute."""

    name = "a stack"


@dataclasses.dataclass
class Plain:
    logits: Tensor
    name: str = "plain"


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    logits: Tensor
    nested: list[Tensor] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nested", [self.logits])


class Adapter:
    """What `torch.utils._pytree` knows."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


pytree.register_pytree_node(Adapter, lambda one: ([one.logits], None), lambda parts, _: Adapter(*parts))


class Opaque:
    """What nothing knows."""

    def __init__(self) -> None:
        self.logits = torch.ones(1)


class Refusing(dict):
    """A dict that cannot be made anew."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it is frozen")


def ones() -> Tensor:
    return torch.ones(1)


CONTAINERS = [
    {"a": ones()},
    [ones()],
    (ones(), 3),
    Pair(ones(), 2),
    OrderedDict(a=ones()),
    defaultdict(list, a=ones()),
    Counter(a=ones()),
    ChainMap({"a": ones()}),
    Output(a=ones()),
    Encoding(a=ones()),
    Frozen({"a": ones()}),
    MappingProxyType({"a": ones()}),
    Stack([ones()]),
    UserList([ones()]),
    deque([ones()], maxlen=2),
    {ones()},
    frozenset([ones()]),
    SimpleNamespace(a=ones()),
    torch.max(torch.ones(2, 2), 0),
    nn.utils.rnn.pack_sequence([torch.ones(2, 1)]),
    Plain(ones()),
    Sealed(ones()),
    Adapter(ones()),
]


def tensors(tree: Any) -> list[Tensor]:
    """All that pickling meets: no knowledge of containers goes into the test."""
    found: list[Tensor] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, one: Any) -> str | None:
            if isinstance(one, Tensor):
                found.append(one)
                return "a tensor"
            return None

    Finder(io.BytesIO()).dump(dict(tree) if isinstance(tree, MappingProxyType) else tree)
    return found


def floating(tree: Any) -> set[torch.dtype]:
    return {one.dtype for one in tensors(tree) if one.is_floating_point()}


@pytest.mark.parametrize("tree", CONTAINERS, ids=lambda tree: type(tree).__name__)
def test_a_container_keeps_its_type_and_is_not_changed(tree: Any) -> None:
    out = polyamp.policy("float16").cast_to_compute(tree)
    assert type(out) is type(tree)
    assert floating(out) == {torch.float16}
    assert floating(tree) == {torch.float32}
    assert type(cast([tree], "float16")[0]) is type(tree)


def test_nested_containers_and_what_is_shared() -> None:
    one = ones()
    out = cast({"a": Plain(one), "b": deque([Encoding(x=one)]), "n": torch.ones(1, dtype=torch.int64)}, "float16")
    assert out["a"].logits is out["b"][0]["x"]
    assert out["n"].dtype == torch.int64


def test_what_has_no_floating_tensors_is_the_same_object() -> None:
    tree = Encoding(ids=torch.tensor([1]))
    assert cast(tree, "float16") is tree


def test_what_holds_itself_ends() -> None:
    ring: list[Any] = [ones()]
    ring.append(ring)
    assert cast(ring, "float16")[0].dtype == torch.float16


@pytest.mark.parametrize("tree", [Opaque(), [Opaque(), torch.tensor(1)], torch.distributions.Normal(ones(), ones())])
def test_what_is_not_understood_is_said_once(tree: Any) -> None:
    with pytest.warns(polyamp.PolyampWarning, match="was not understood: its tensors keep their format"):
        assert polyamp.policy("float16").cast_to_compute(tree) is not None
    assert floating(polyamp.policy("float16").cast_to_compute(tree)) == {torch.float32}


def test_what_cannot_be_made_anew_stays_and_is_said() -> None:
    tree = Refusing(a=ones())
    with pytest.warns(polyamp.PolyampWarning, match="Refusing was not understood"):
        assert cast(tree, "float16") is tree


def test_attributes_other_than_fields_are_tensors_too() -> None:
    tree = Plain(ones())
    tree.extra = ones()  # type: ignore[attr-defined]
    assert floating(cast(tree, "float16")) == {torch.float16}


def test_a_module_among_the_arguments_is_not_stored_anew() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, other: nn.Module) -> nn.Module:
            return other

    other = nn.Linear(1, 1)
    assert polyamp.convert(Model(), "O2")(other) is other
    assert other.weight.dtype == torch.float32


def test_gradients_flow_through_every_container() -> None:
    weight = ones().requires_grad_()
    cast(Sealed(weight), "float16").logits.sum().backward()
    assert weight.grad is not None
