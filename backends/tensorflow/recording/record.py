"""`record`: one training step, run up to its update, with everything in it counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.capture import check_format, check_function
from polyamp.backends.tensorflow.graphs.decisions import Inside
from polyamp.backends.tensorflow.graphs.functions import decided_for
from polyamp.backends.tensorflow.graphs.scaling import SCALES
from polyamp.backends.tensorflow.graphs.writing import Writer
from polyamp.backends.tensorflow.recording.counting import Totals
from polyamp.backends.tensorflow.recording.values import Traced, recorded, traced
from polyamp.backends.tensorflow.recording.writing import Instrumented
from polyamp.backends.tensorflow.unstable import FunctionLibrary, flat_inputs, runnable
from polyamp.diagnosis.recording import Recording
from polyamp.policies import Policy


def record(
    step: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    policy: Policy,
    *,
    widened: bool,
    scale: float | None = None,
) -> Recording:
    """Run one step up to its update and count every tensor; variables have their old values afterwards."""
    check_format(policy.compute)
    check_function(step)
    program = Program(traced(step, args, kwargs), policy, widened=widened)
    return program.run(args, kwargs, scale)


class Program:
    """A traced step with added nodes that count."""

    def __init__(self, step: Traced, policy: Policy, *, widened: bool) -> None:
        self._step, self._policy, self._widened = step, policy, widened
        decisions = decided_for(step.concrete, policy, fuses=False)
        outer, self._subjects = recorded(decisions, step.taken)
        self._totals = Totals(len(self._subjects))
        definition = step.concrete.function_def
        library = _Library()
        name = definition.signature.name
        library.own[name] = definition
        if not widened:
            results = tuple(dtype for _, dtype in decisions.graph.results)
            name = Writer(library.add).function(Inside(name, decisions, results), definition)
        written = Instrumented(library, self._totals, widened=widened)
        # A function that creates variables is traced twice: nothing of the first trace is left.
        losses = [value for one in step.taken if (value := outer.value_of(one.loss)) is not None]
        written.step(outer, name, losses[:1])
        self._counting = written.counting
        self._function = runnable([*library.added, *written.definitions])

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], scale: float | None) -> Recording:
        """Run one step with these arguments and return its recording."""
        step, variables = self._step, self._step.concrete.graph.variables
        own = _scale_of(variables) if step.differentiates else None
        used = float(scale) if scale is not None else 1.0 if own is None else float(own)
        scaled = (tf.constant(used, tf.float32), args, dict(kwargs))
        inputs = flat_inputs(step.concrete, *((args, kwargs) if step.differentiates else (scaled, {})))
        with self._totals.kept(), _restored(variables):
            if own is not None:
                own.assign(used)
            results = self._function.call_flat(*inputs)
            spreads = self._totals.spreads()
        observed = (subject.observed(spread) for subject, spread in zip(self._subjects, spreads, strict=True))
        loss = float(results[0]) / (used if step.differentiates else 1.0) if results else None
        return Recording(
            "tensorflow", str(self._policy), loss, used, self._widened, tuple(observed), step.differentiates
        )


class _Library(Mapping[str, Any]):
    """The runtime's functions, and the new ones."""

    def __init__(self) -> None:
        self._known, self.own, self.added = FunctionLibrary(), dict[str, Any](), list[Any]()

    def add(self, definition: Any) -> None:
        self.own[definition.signature.name] = definition
        self.added.append(definition)

    def __getitem__(self, name: str) -> Any:
        return self.own[name] if name in self.own else self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter({*self.own, *self._known})

    def __len__(self) -> int:
        return len({*self.own, *self._known})


def _scale_of(variables: Sequence[Any]) -> Any:
    """Return the variable that holds the loss scale; None if there is none."""
    names = ((variable, variable.name.rpartition("/")[2].partition(":")[0]) for variable in variables)
    found = (variable for variable, name in names if name in SCALES and not variable.trainable)
    return next((one for one in found if one.shape == () and one.dtype == tf.float32), None)


@contextmanager
def _restored(variables: Sequence[Any]) -> Iterator[None]:
    """Restore the values of variables at the end."""
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
