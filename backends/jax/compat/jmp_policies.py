"""jmp's policies: the dtypes of parameters, computation and outputs, and the texts that name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.backends.jax import casting
from polyamp.backends.jax.compat.structure import replaced
from polyamp.errors import InvalidTypeError, InvalidValueError
from polyamp.formats import FORMATS, name_of_dtype
from polyamp.scripts.session import found
from polyamp.validation import did_you_mean, shown

dtype_to_names: dict[Any, tuple[str, ...]] = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}
"""The words for each dtype; ``str(policy)`` uses the first one."""

_DTYPES = {name: dtype for dtype, names in dtype_to_names.items() for name in names}
_KEYS = {"p": "param", "params": "param", "c": "compute", "compute": "compute", "o": "output", "output": "output"}


@dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computation and outputs. `polyamp.policy` accepts it, and so does haiku.

    >>> policy = Policy(jnp.float32, jnp.float16, jnp.float32)
    >>> str(policy), policy.cast_to_compute(jnp.ones(2)).dtype
    ('p=full,c=f16,o=full', dtype('float16'))

    Args:
        param_dtype: dtype of stored parameters.
        compute_dtype: dtype of the computation.
        output_dtype: dtype of the outputs.

    Raises:
        InvalidTypeError: a dtype is not a floating-point format of `polyamp.FORMATS`.
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def __post_init__(self) -> None:
        names = {part: _format(getattr(self, f"{part}_dtype"), part) for part in ("param", "compute", "output")}
        formats = ", ".join(f'{part}="{name}"' for part, name in names.items())
        if set(names.values()) != {"float32"}:
            found("jmp.Policy")
        replaced("jmp.Policy", f"polyamp.policy({formats})")

    def cast_to_param(self, x: Any) -> Any:
        """Return a pytree with its floating-point arrays in ``param_dtype``, and all other leaves unchanged."""
        return casting.cast(x, _format(self.param_dtype, "param"))

    def cast_to_compute(self, x: Any) -> Any:
        """Return a pytree with its floating-point arrays in ``compute_dtype``; see `cast_to_param`."""
        return casting.cast(x, _format(self.compute_dtype, "compute"))

    def cast_to_output(self, x: Any) -> Any:
        """Return a pytree with its floating-point arrays in ``output_dtype``; see `cast_to_param`."""
        return casting.cast(x, _format(self.output_dtype, "output"))

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """Return the same policy with another ``output_dtype``."""
        return Policy(self.param_dtype, self.compute_dtype, output_dtype)

    def __str__(self) -> str:
        words = (_word(dtype) for dtype in (self.param_dtype, self.compute_dtype, self.output_dtype))
        return "p={},c={},o={}".format(*words)


def get_policy(policy_name: str) -> Policy:
    """Return the policy that a text describes.

    >>> str(get_policy("c=bf16,o=f32")), str(get_policy("half"))
    ('p=full,c=bf16,o=full', 'p=f16,c=f16,o=f16')

    Args:
        policy_name: ``params=...,compute=...,output=...``, or short ``p=...,c=...,o=...``. ``params`` is float32 by
            default, ``compute`` follows ``params``, and ``output`` follows ``compute``. A single dtype is used for all
            three. Dtypes are ``full``, ``half``, ``float16``, ``f16``, and so on.

    Raises:
        InvalidValueError: a key or a dtype is unknown, or a key appears twice.
    """
    if "=" not in policy_name:
        return Policy(*[_parsed(policy_name, policy_name)] * 3)
    dtypes: dict[str, Any] = {}
    for part in policy_name.split(","):
        key, _, word = part.partition("=")
        if key not in _KEYS or _KEYS[key] in dtypes:
            what = f"{key!r} appears twice" if key in _KEYS else f"Unknown key {key!r}"
            raise _bad_policy(what, policy_name, ", ".join(_KEYS), did_you_mean(key, _KEYS))
        dtypes[_KEYS[key]] = _parsed(word, policy_name)
    param = dtypes.get("param", jnp.float32)
    compute = dtypes.get("compute", param)
    return Policy(param, compute, dtypes.get("output", compute))


def half_dtype() -> Any:
    """Return the 16-bit dtype of the first device: bfloat16 on a TPU, else float16.

    >>> half_dtype().dtype
    dtype('float16')
    """
    replaced("jmp.half_dtype()", 'polyamp.policy("mixed_float16").compute_dtype, or mixed_bfloat16')
    return _half()


def cast_to_full(tree: Any) -> Any:
    """Return a pytree with its floating-point arrays in float32, and all other leaves unchanged.

    >>> cast_to_full({"w": jnp.ones(2, jnp.bfloat16), "n": 3})["w"].dtype
    dtype('float32')
    """
    replaced("jmp.cast_to_full(tree)", 'polyamp.policy("float32").cast_to_compute(tree)')
    return casting.cast(tree, "float32")


def cast_to_half(tree: Any) -> Any:
    """Return a pytree with its floating-point arrays in `half_dtype`, and all other leaves unchanged.

    >>> cast_to_half({"w": jnp.ones(2), "n": 3})["w"].dtype
    dtype('float16')
    """
    found("jmp.cast_to_half")
    name = _format(_half(), "compute")
    replaced("jmp.cast_to_half(tree)", f'polyamp.policy("mixed_{name}").cast_to_compute(tree)')
    return casting.cast(tree, name)


def _format(dtype: Any, part: str) -> str:
    name = dtype if isinstance(dtype, str) and dtype in FORMATS else name_of_dtype(dtype)
    if name is not None:
        return name
    raise InvalidTypeError(
        "this is not a floating-point dtype",
        where=f"jmp.Policy({part}_dtype=)",
        found=shown(dtype),
        allowed=", ".join(FORMATS),
        fix="pass a dtype such as jnp.float16",
    )


def _word(dtype: Any) -> str:
    name = _format(dtype, "param")
    return dtype_to_names[_DTYPES[name]][0] if name in _DTYPES else name


def _half() -> Any:
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def _parsed(word: str, policy_name: str) -> Any:
    if word == "half":
        return _half()
    if word not in _DTYPES:
        raise _bad_policy(f"Unknown dtype {word!r}", policy_name, ", ".join(("half", *_DTYPES)), "")
    return _DTYPES[word]


def _bad_policy(what: str, text: str, allowed: str, hint: str) -> InvalidValueError:
    return InvalidValueError(
        what,
        where="jmp.get_policy(policy_name)",
        found=repr(text),
        allowed=allowed,
        fix=f'{hint}write, for example, "params=float32,compute=float16,output=float32"',
    )
