"""The meaning of ``package.module:function`` on a command line: a step with its arguments, or a training function.

For example, ``train:make_step`` loads the function ``make_step`` of ``train.py``, calls it without arguments, and takes
its result, such as ``(step, batch)``. The forms that the result can have are in `FORMS`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polyamp
from polyamp.errors import InvalidTypeError, InvalidValueError, shown

FORMS = 'a step; (step, *arguments); or {"step": step, "args": (...), "optimizer": ..., "policy": ...}'


@dataclass(frozen=True)
class Target:
    """The arguments for a verb."""

    step: Any  # the first argument: a step, or a training function
    args: tuple[Any, ...] = ()  # the step's own arguments
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of verbs, by name

    def call(self, verb: Callable[..., Any], **given: Any) -> Any:
        """Call a verb with the arguments that it accepts. Values in ``given`` take precedence, unless they are None."""
        taken = {name: value for name, value in self.options.items() if name in _options_of(verb)}
        stated = {name: value for name, value in given.items() if value is not None}
        return verb(self.step, *self.args, **{**taken, **stated}, **self.kwargs)


def step_of(text: str) -> Target:
    """Return the step that ``package.module:function`` returns, or is."""
    function = load(text)
    if _takes_arguments(function):
        raise InvalidTypeError(
            "this function takes arguments, which the command line cannot know",
            where=text,
            found=f"{text.partition(':')[2]}{inspect.signature(function)}",
            allowed=f"a function without arguments that returns {FORMS}",
            fix="write a function that makes the step and a batch and returns (step, *arguments)",
        )
    made = function()
    if isinstance(made, Mapping):
        return _of_mapping(made, "step", text)
    if isinstance(made, tuple) and made and callable(made[0]):
        return Target(made[0], made[1:])
    return Target(made if callable(made) else function)


def training_of(text: str) -> Target:
    """Return the training function: ``package.module:function`` if it takes arguments, else its result."""
    function = load(text)
    if _takes_arguments(function) or "seed" in _parameters_of(function):  # which may have a default
        return Target(function)
    made = function()
    if isinstance(made, Mapping):
        return _of_mapping(made, "train", text)
    if not callable(made):
        raise _bad_form(
            text, made, 'train(policy, seed) itself; or a function that returns it, or {"train": train, ...}'
        )
    return Target(made)


def load(text: str) -> Callable[..., Any]:
    """Load the object that ``package.module:function`` names. Modules in the current directory are found first."""
    module_name, _, path = text.partition(":")
    is_module = all(part.isidentifier() for part in module_name.split(".")) and not module_name.endswith(".py")
    if not (is_module and path):
        meant = f"; {module_name[:-3]}:{path} for a file" if module_name.endswith(".py") and path else ""
        raise _unknown("not the name of a function", text, f"package.module:function, as in train:make_step{meant}")
    found = _module(module_name, text)
    for name in path.split("."):
        if not hasattr(found, name):
            functions = [key for key, value in vars(found).items() if inspect.isfunction(value) and key[0] != "_"]
            allowed = f"one of its functions: {', '.join(functions) or 'it has none'}"
            raise _unknown(f"{module_name} has no {path}", text, allowed)
        found = getattr(found, name)
    if not callable(found):
        raise _bad_form(text, found, "a function")
    function: Callable[..., Any] = found
    return function


def _module(name: str, text: str) -> Any:
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # an import inside that module failed
        allowed = f"a module in {os.getcwd()}, or an installed one"
        raise _unknown(f"there is no module {error.name}", text, allowed) from error


def _of_mapping(made: Mapping[str, Any], key: str, text: str) -> Target:
    verbs: tuple[Callable[..., Any], ...] = (
        polyamp.diagnose,
        polyamp.explain,
        polyamp.lint,
        polyamp.parity,
        polyamp.profile,
    )
    options = {name for verb in verbs for name in _options_of(verb)}
    unknown = sorted(made.keys() - options - {"step", "train", "args", "kwargs"})
    if unknown:
        raise _unknown(f"unknown {', '.join(map(repr, unknown))} in its result", text, ", ".join(sorted(options)))
    if not callable(made.get(key)):
        raise _bad_form(text, made.get(key), f'a function under "{key}"')
    given = {name: value for name, value in made.items() if name in options}
    if key == "train":
        return Target(made["train"], options=given)
    return Target(made["step"], tuple(made.get("args", ())), made.get("kwargs", {}), given)


def _options_of(verb: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(verb).parameters.values()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {one.name for one in parameters if one.kind in named} - {"train", "fn"}


def _takes_arguments(function: Callable[..., Any]) -> bool:
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = _parameters_of(function).values()
    return any(one.kind not in any_number and one.default is inspect.Parameter.empty for one in parameters)


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # builtins
        return {}


def _unknown(what: str, text: str, allowed: str) -> InvalidValueError:
    return InvalidValueError(
        what, where=repr(text), allowed=allowed, fix="write package.module:function; see polyamp COMMAND --help"
    )


def _bad_form(text: str, found: object, allowed: str) -> InvalidTypeError:
    return InvalidTypeError(
        "the command does not accept this",
        where=repr(text),
        found=shown(found),
        allowed=allowed,
        fix="see polyamp COMMAND --help for the forms",
    )
