"""Find where nodes come from: their source lines, and the shapes of their values."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from polyamp.backends.tensorflow.graphs.graph import Graph
from polyamp.backends.tensorflow.unstable import graph_of


class Places:
    """The source lines and shapes that a traced ``tf.Graph`` knows."""

    def __init__(self, traced: Any) -> None:
        self._traced = traced

    def within(self, function: str) -> Places:
        """Return the places of a function that this graph calls."""
        return Places(graph_of(function, self._traced))

    def of(self, path: str, name: str) -> str:
        """Return the path and name of a node, and the line of the user's code that made it."""
        return " ".join(filter(None, ("/".join(filter(None, (path, name))), self.line(name))))

    def line(self, name: str) -> str:
        """Return file and line of the user's code that made a node; empty if that is not known."""
        # Code of TensorFlow, Keras, polyamp and the standard library is not the user's.
        operation = self._operation(name)
        frames = [] if operation is None else reversed(operation.traceback or [])
        own = next((frame for frame in frames if not frame[0].startswith(_libraries())), None)
        return f"{Path(own[0]).name}:{own[1]}" if own else ""

    def is_users(self, name: str) -> bool:
        """Return whether the user's own code made a node, and not a layer, a loss or an autocast that it called."""
        # Calls through functions of TensorFlow and ``keras.ops`` count for their caller.
        operation = self._operation(name)
        frames = [] if operation is None else reversed(operation.traceback or [])
        maker = next((frame[0] for frame in frames if not _is_plain_function(frame[0])), "")
        return bool(maker) and not maker.startswith(_libraries())

    def elements(self, graph: Graph, value: str) -> int:
        """Return the number of elements of a value; 0 if its shape is not known."""
        shape = self.shape(graph, value)
        return 0 if shape is None else math.prod(shape)

    def shape(self, graph: Graph, value: str) -> tuple[int, ...] | None:
        """Return the shape of a value; None if it is not known."""
        tensor = self._tensor(graph, value)
        return tuple(tensor.shape) if tensor is not None and tensor.shape.is_fully_defined() else None

    def _tensor(self, graph: Graph, value: str) -> Any:
        maker = graph.maker.get(value)
        if maker is None:  # an argument, which has another name in a function's definition
            arguments = dict(
                zip((name for name, _ in graph.arguments), getattr(self._traced, "inputs", ()), strict=False)
            )
            return arguments.get(value)
        operation = self._operation(maker.name)
        index = maker.outputs.index(value)
        return operation.outputs[index] if operation is not None and index < len(operation.outputs) else None

    def _operation(self, name: str) -> Any:
        if self._traced is None:
            return None
        try:
            return self._traced.get_operation_by_name(name)
        except KeyError:
            return None


_OWN = (str(Path(__file__).resolve().parents[1]), str(Path(__file__).parents[1]))


@functools.cache
def _is_plain_function(file: str) -> bool:
    """Return whether a file has functions of TensorFlow, or Keras' operations."""
    # The packages' own folders are compared, because any folder may have such a name.
    here = Path(file)
    if here.is_relative_to(Path(tf.__file__).parent):
        return True
    keras = sys.modules.get("keras")
    folder = Path(keras.__file__).parent if keras is not None and keras.__file__ else None
    return (
        folder is not None
        and here.is_relative_to(folder)
        and bool({"ops", "backend"} & {*here.relative_to(folder).parts})
    )


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders whose code is not the user's."""
    packages = ("tensorflow", "keras", "polyamp", "functools", "contextlib")
    loaded = (sys.modules.get(name) for name in packages)
    files = [Path(module.__file__) for module in loaded if module is not None and module.__file__]
    folders = {str(file.parent) if file.name == "__init__.py" else str(file) for file in files}
    return tuple(sorted(folders | set(_OWN)))
