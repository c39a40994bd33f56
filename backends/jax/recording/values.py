"""The values of a recorded step: what is known of each, and 16-bit values computed in float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.backends.jax import unstable
from polyamp.backends.jax.graphs.cells import FLOAT32
from polyamp.backends.jax.operations import canonical
from polyamp.backends.jax.recording.counting import Sample, sample, stride_of
from polyamp.diagnosis.recording import Kind
from polyamp.operations import OPERATIONS

_CHECKPOINTS = ("rematted_computation", "checkpoint")


class Origin(NamedTuple):
    """The operation that computed a tensor."""

    name: str
    where: str
    op_class: str
    format: str
    number: int | None = None  # the unique number of its record; None if no record is of exactly this tensor


class Evaluated(NamedTuple):
    """An array while a step is evaluated."""

    array: Any  # its current value; a 16-bit value of a widened step is float32
    backward: bool = False  # whether the backward pass computed it
    scaled: bool = False  # whether the loss scale is a factor of it
    # the operation that computed it, before casts and moves; None for constants and inputs
    origin: Origin | None = None

    def elsewhere(self) -> Evaluated:
        """Return the value as it leaves a loop or branch, no longer tied to records inside (of other arrays)."""
        return self if self.origin is None else self._replace(origin=self.origin._replace(number=None))


class Record(NamedTuple):
    """A future observation, whose sample is not counted yet."""

    kind: Kind
    origin: Origin  # the other fields of the observation
    shape: tuple[int, ...]
    array: Any  # its elements; None once they are sampled
    turns: int  # number of iterations of the loops around it
    sample: Any = None  # a sample with its elements, or the number of that sample in a list; None if there is none yet
    member: int = 0  # its place in the sample
    scaled: bool = False  # whether the loss scale is a factor of it
    replaces: int | None = None  # number of the record of the same tensor that this one replaces
    named: bool = False  # for a parameter's gradient, whether the optimizer named it


def sampled(records: Iterable[Record]) -> list[Record]:
    """Return records with samples; tensors of one size share a sample, up to a total size, as it needs all at once."""
    own, groups = list(records), dict[Any, list[list[int]]]()
    flat = {index: record.array.reshape(-1) for index, record in enumerate(own) if record.sample is None}
    for index, array in flat.items():
        like = jax.typeof(array), stride_of(array.size, own[index].turns)  # a type has a sharding too
        found = groups.setdefault(like, [[]])
        if len(found[-1]) * array.size >= _TOGETHER:
            found.append([])
        found[-1].append(index)
    for (_, step), found in groups.items():
        for indices in found:
            shared = sample([flat[index].astype(jnp.float32) for index in indices], step)
            for member, index in enumerate(indices):
                own[index] = own[index]._replace(array=None, sample=shared, member=member)
    return own


def samples_of(records: Iterable[Record]) -> list[Sample]:
    """Return the samples of records, each once."""
    return list({id(record.sample): record.sample for record in records}.values())


def with_samples(records: Sequence[Record], samples: Iterable[Any]) -> list[Record]:
    """Return records with ``samples``, in the order of `samples_of`, in place of their own."""
    others = dict(zip(map(id, samples_of(records)), samples, strict=True))
    return [record._replace(sample=others[id(record.sample)]) for record in records]


_TOGETHER = 2**22  # elements


class Place(NamedTuple):
    """Where in a step an equation is."""

    path: str = ""  # named scopes, joined by ``/``
    differentiated: bool = False  # whether it belongs to the forward or backward pass of a derivative
    backward: bool = False  # whether it belongs to the backward pass
    again: bool = False  # whether it recomputes the forward pass, for ``jax.checkpoint``
    turns: int = 1  # number of iterations of the loops around it

    def of(self, equation: Any) -> Place:
        """Return where an equation is, in a program that is at this place."""
        names, steps = unstable.scopes(equation).split("/"), unstable.transformations(equation)
        return Place(
            "/".join(filter(None, (self.path, *(name for name in names if name not in _CHECKPOINTS)))),
            self.differentiated or not steps.isdisjoint(("jvp", "transpose")),
            self.backward or "transpose" in steps,
            self.again or _CHECKPOINTS[0] in names,
            self.turns,
        )


_LOW = frozenset({np.dtype("float16"), np.dtype(jnp.bfloat16)})


def is_low(dtype: Any) -> bool:
    """Return whether a dtype's values are held in float32."""
    return dtype in _LOW


def widened(array: Any, dtype: Any) -> Any:
    """Return an array in float32 if its declared dtype has 16 bits; else unchanged."""
    return unstable.converted(array, FLOAT32) if is_low(dtype) else array


def bound_widened(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return the results of an equation, with float32 arrays in place of 16-bit ones."""
    # An equation that works on bits, has an inner program or is not in the table runs as written, on rounded arrays.
    before, after = ([unstable.dtype_in(var) for var in side] for side in (equation.invars, equation.outvars))
    if not any(map(is_low, (*before, *after))):
        return unstable.bound(equation, arrays)
    if equation.primitive.name == "reduce_precision":
        return list(arrays)
    entry = OPERATIONS.get(canonical(equation.primitive.name, equation.params))
    is_wide_too = entry is not None and (entry.op_class != "keep" or equation.primitive.name == "convert_element_type")
    if is_wide_too and not unstable.inner_programs(equation):
        return unstable.bound(equation, arrays, _adapted(equation.params))
    given = [
        unstable.converted(array, dtype) if is_low(dtype) else array
        for array, dtype in zip(arrays, before, strict=True)
    ]
    return [widened(array, dtype) for array, dtype in zip(unstable.bound(equation, given), after, strict=True)]


def _adapted(params: dict[str, Any]) -> dict[str, Any]:
    changed = {key: FLOAT32 for key, value in params.items() if isinstance(value, np.dtype) and is_low(value)}
    if params.get("update_jaxpr") is not None:
        changed["update_jaxpr"] = _retraced(params["update_jaxpr"], params["update_consts"])
    return {**params, **changed}


def _retraced(jaxpr: Any, constants: Sequence[Any]) -> Any:
    """Return the function that a scatter applies to two elements, traced for float32."""
    scalar = jax.ShapeDtypeStruct((), FLOAT32)  # type: ignore[no-untyped-call]
    closed = jax.make_jaxpr(lambda *pair: jax.core.eval_jaxpr(jaxpr, constants, *pair))(scalar, scalar)
    return unstable.opened(closed)[0]
