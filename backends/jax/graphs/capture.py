"""Captures a call of a function as a program: its jaxpr, separate from all that is static. Lists jaxprs' equations.

A function that cannot be traced is refused with the user's line and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from polyamp.backends.jax import unstable
from polyamp.backends.jax.casting import check_tree, is_array
from polyamp.backends.jax.graphs.cells import is_inexact
from polyamp.backends.jax.modules import arrays_of_modules
from polyamp.errors import UsageError, is_users

Run = Callable[["Program", Sequence[Any]], list[Any]]
"""A way to run a program: it returns the arrays of the results."""


class Program:
    """A traced call of a function."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[bool]
    ) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        self.parameters = arrays_of_modules(fn)
        self._is_array = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
        self.are_parameters = [flag for flag, is_one in zip(parameters, self._is_array, strict=True) if is_one]
        self.arrays = [leaf for leaf, is_one in zip(leaves, self._is_array, strict=True) if is_one]
        self._results: list[Any] = []

        def of_arrays(*arrays: Any) -> list[Any]:
            given, kept = iter(arrays), zip(leaves, self._is_array, strict=True)
            own_args, own_kwargs = jax.tree.unflatten(tree, [next(given) if is_one else leaf for leaf, is_one in kept])
            returned = fn(*own_args, **own_kwargs)
            check_tree(returned, where="the results of the function")
            results, self._tree = jax.tree.flatten(returned)
            self._given = [is_array(leaf) for leaf in results]
            self._results = [None if is_array(leaf) else leaf for leaf in results]
            return [leaf for leaf in results if is_array(leaf)]

        with _refusals():
            self.closed = jax.make_jaxpr(of_arrays)(*self.arrays)

    def as_traced(self, arrays: Sequence[Any]) -> list[Any]:
        """Run the function as written, without the policy, and return the arrays of its results."""
        jaxpr, constants = unstable.opened(self.closed)
        results: list[Any] = jax.core.eval_jaxpr(jaxpr, constants, *arrays)
        return results

    def results(self, arrays: Sequence[Any]) -> Any:
        """Return what the function returned, with ``arrays`` in place of the arrays in it."""
        given, kept = iter(arrays), zip(self._results, self._given, strict=True)
        return jax.tree.unflatten(self._tree, [next(given) if is_one else leaf for leaf, is_one in kept])

    def vjp(self, run: Run, arrays: Sequence[Any], places: Sequence[int]) -> Any:
        """Run the program by ``run``; return floating-point results and their pullback to the arguments ``places``."""

        def of_places(own: dict[int, Any]) -> list[Any]:
            results = run(self, [own.get(place, array) for place, array in enumerate(arrays)])
            return [result for result in results if is_inexact(result.dtype)]

        return jax.vjp(of_places, {place: arrays[place] for place in places})

    @property
    def floating(self) -> list[int]:
        """The positions of the floating-point arrays among the arguments."""
        return [place for place, array in enumerate(self.arrays) if is_inexact(array.dtype)]

    def bytes_saved(self, run: Run) -> int | None:
        """Return the bytes that ``jax.vjp`` keeps for floating-point arguments; None if ``jax.vjp`` fails."""

        def kept(arrays: Sequence[Any]) -> list[Any]:  # leaves: JAX caches the tree of a result, and with it a jaxpr
            return jax.tree.leaves(self.vjp(run, arrays, self.floating)[1])

        try:
            residuals = jax.eval_shape(kept, self.arrays)
        except Exception:  # as for a while loop; the user's own rules may raise anything
            return None
        return sum(int(leaf.size) * int(leaf.dtype.itemsize) for leaf in residuals)


_BRANCHES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@contextmanager
def _refusals() -> Iterator[None]:
    """Replace errors of JAX and flax during tracing by errors that name the remedy."""
    try:
        yield
    except _BRANCHES as error:
        raise UsageError(
            "the function reads the value of a traced array",
            where=_user_line(error),
            found=str(error).partition("\n")[0],
            allowed="control flow by jax.lax.cond, jax.lax.while_loop or jnp.where; arguments that are not arrays",
            fix="rewrite that line with one of these, or pass the value that it reads as a Python number",
        ) from error
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # of flax.errors, which is not imported just for this test
            raise
        raise UsageError(
            "the function changes an NNX module that is not among its arguments",
            where=_user_line(error),
            found=str(error).partition("\n")[0],
            allowed="modules among the arguments of the function",
            fix="pass the module as an argument: autocast(lambda model, x: model(x), policy)(model, x)",
        ) from error


def _user_line(error: BaseException) -> str:
    """Return the traceback's innermost line outside polyamp, JAX and packages such as flax."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        if is_users(frame.tb_frame.f_code.co_filename):
            found = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno} ({frame.tb_frame.f_code.co_name})"
        frame = frame.tb_next
    return found or "the traced function"


class Equation(NamedTuple):
    """An equation anywhere in a program."""

    own: Any  # the equation in the jaxpr
    path: str  # its scopes, and those of the equations that hold it
    is_backward: bool
    times: int  # how often it runs

    @property
    def name(self) -> str:
        """The name of the equation's primitive."""
        name: str = self.own.primitive.name
        return name


def walk(closed: Any, path: str = "", is_backward: bool = False, times: int = 1) -> Iterator[Equation]:
    """Yield all equations; in place of one that holds a program, yield that program's."""
    for own in unstable.opened(closed)[0].eqns:
        place = "/".join(filter(None, (path, unstable.scopes(own))))
        backward = is_backward or "transpose" in unstable.transformations(own)
        parts = unstable.inner_programs(own)
        if not parts:
            yield Equation(own, place, backward, times)
        turns = own.params["length"] if own.primitive.name == "scan" else 1
        for part in parts:
            yield from walk(part, place, backward, times * turns)
