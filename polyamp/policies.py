"""A precision policy: the formats of stored parameters, matrix work and outputs, the rules, and the loss scale."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_arguments,
    did_you_mean,
    reading,
    shown,
    unknown_options,
    warn_once,
    wrong_type,
)
from polyamp.flow import Decision, Rule, decide, parse_rules
from polyamp.formats import format_of, name_of_dtype
from polyamp.scale import LossScale

# --- the spellings of policies ----------------------------------------------------------------------------------------

_FIELDS = {"p": "param", "param": "param", "params": "param", "c": "compute", "compute": "compute"}
_FIELDS |= {"o": "output", "output": "output"}


@dataclass(frozen=True)
class _Words:
    """The parts of a policy that a text states; the rest is decided elsewhere."""

    formats: dict[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] | None = None
    loss_scale: LossScale | None = None
    name: str | None = None  # the recognised word
    label: str = ""


def default_rules(param: str, compute: str, output: str) -> tuple[Rule, ...]:
    """Return the rules that the formats imply: none, except for pure 16-bit policies."""
    # The operation table keeps norms in float32 inside. Pure 16-bit policies lower them, as Keras and Apex O3 do.
    pure = param == compute == output and format_of(compute).is_low
    return (Rule("*_norm", "lower"),) if pure else ()


def default_loss_scale(compute: str) -> LossScale:
    """Return a dynamic loss scale for float16, whose gradients underflow; for other low formats a check alone."""
    if compute == "float16":
        return LossScale()
    return LossScale.skip_nonfinite() if format_of(compute).is_low else LossScale.none()


def _word(formats: str, loss_scale: LossScale | None = None) -> _Words:
    return _Words(dict(zip(("param", "compute", "output"), formats.split(), strict=True)), None, loss_scale)


_WORDS: dict[str, _Words] = {
    "float32": _word("float32 float32 float32"),
    "float64": _word("float64 float64 float64"),
    "mixed_float16": _word("float32 float16 float32"),
    "mixed_bfloat16": _word("float32 bfloat16 float32"),
    "float16": _word("float16 float16 float16"),
    "bfloat16": _word("bfloat16 bfloat16 bfloat16"),
    "O2": _word("float16 float16 float32"),
    "O3": _word("float16 float16 float16", LossScale.skip_nonfinite()),
}

SAME_AS: dict[str, str] = {
    # jmp
    "full": "float32",
    "half": "float16",
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    # Apex amp, frontend.py
    "O0": "float32",
    "O1": "mixed_float16",
    # Lightning and Fabric, plugins/precision
    "64-true": "float64",
    "32-true": "float32",
    "16-mixed": "mixed_float16",
    "bf16-mixed": "mixed_bfloat16",
    "16-true": "float16",
    "bf16-true": "bfloat16",
    # Hugging Face accelerate: mixed_precision=
    "no": "float32",
    "fp32": "float32",
    "fp16": "mixed_float16",
    "bf16": "mixed_bfloat16",  # in jmp it means pure bfloat16; the many trainers that use it mean mixed
    # MosaicML Composer
    "amp_fp16": "mixed_float16",
    "amp_bf16": "mixed_bfloat16",
}

_COMMON = ("mixed_float16", "mixed_bfloat16", "float32", "float16", "bfloat16", "O2")
WORDS: tuple[str, ...] = (*_WORDS, *SAME_AS)
_DEVICES = ("cuda", "cpu", "gpu", "tpu", "mps", "xpu", "hpu")  # torch.autocast needs a device; a policy does not
_BY_LOWER = {word.lower(): SAME_AS.get(word, word) for word in WORDS}


def _read(text: str, *, where: str) -> _Words:
    """Parse one policy text: a word or ``key=format`` pairs, then optionally a JSON object of further settings."""
    head, brace, tail = text.partition("{")
    words = _read_pairs(head, where) if "=" in head else _read_word(head, where)
    if not brace:
        return words
    settings = _read_settings(brace + tail, where)
    rules = parse_rules(settings["rules"], where=where) if "rules" in settings else words.rules
    scale = LossScale.from_dict(settings["loss_scale"]) if "loss_scale" in settings else words.loss_scale
    return _Words(words.formats, rules, scale, words.name, settings.get("name", ""))


def _write(param: str, compute: str, output: str, rules: tuple[Rule, ...], loss_scale: LossScale, label: str) -> str:
    """Return the text that `read` parses back to the same settings."""
    formats = {"param": param, "compute": compute, "output": output}
    default_scale = default_loss_scale(compute)
    alike = {
        word: meaning.loss_scale or default_scale for word, meaning in _WORDS.items() if meaning.formats == formats
    }
    word = next((word for word, scale in alike.items() if scale == loss_scale), next(iter(alike), None))
    settings: dict[str, object] = {}
    if rules != default_rules(param, compute, output):
        settings["rules"] = dict(rules)
    if loss_scale != (alike[word] if word else default_scale):
        settings["loss_scale"] = loss_scale.to_dict()
    if label:
        settings["name"] = label
    head = word or f"params={param},compute={compute},output={output}"
    return f"{head} {json.dumps(settings)}" if settings else head


def _read_word(text: str, where: str) -> _Words:
    words = text.replace(",", " ").split()
    if not words:
        raise _bad("blank policy", where, text)
    meanings = {_BY_LOWER.get(word.lower()) for word in words}
    if None in meanings:
        unknown = next(word for word in words if word.lower() not in _BY_LOWER)
        raise _bad("unknown policy", where, text, _hint(unknown))
    if len(words) > 1:
        raise _bad("repeated policy words" if len(meanings) == 1 else "contradictory policy words", where, text)
    name = meanings.pop()
    assert name is not None
    meaning = _WORDS[name]
    return _Words(dict(meaning.formats), meaning.rules, meaning.loss_scale, name)


def _read_pairs(text: str, where: str) -> _Words:
    formats: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise _bad("blank word in a policy", where, text)
        if key.lower() not in _FIELDS:
            raise _bad(f"unknown policy key {key!r}", where, text, did_you_mean(key, _FIELDS))
        name = _FIELDS[key.lower()]
        if name in formats:
            raise _bad(f"{name} appears twice", where, text)
        formats[name] = format_of(value, where=f"{where}: {part.strip()}").name
    return _Words(formats)


def _read_settings(text: str, where: str) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(text)  # text that starts with a brace can only be an object
    except json.JSONDecodeError as error:
        raise _bad(f"a policy's settings are not a JSON object ({error})", where, text) from error
    unknown = sorted(set(settings) - {"rules", "loss_scale", "name"})
    if unknown:
        raise _bad(f"unknown policy settings {', '.join(unknown)}", where, text)
    return settings


def _hint(word: str) -> str:
    """Suggest a replacement for a word that is not a policy."""
    if word.partition(":")[0].lower() in _DEVICES:
        return "no device is needed, every one is covered: give a policy, for example mixed_float16. "
    return did_you_mean(word, WORDS)


def _bad(what: str, where: str, found: str, hint: str = "") -> InvalidValueError:
    return InvalidValueError(
        what,
        where=where,
        found=shown(found),
        allowed=f"{', '.join(_COMMON)}, and others of docs/reference/policies.md; or params=FORMAT,compute=FORMAT",
        fix=f"{hint}{'Else use' if hint else 'use'} one name of a policy, or each key once",
    )


# --- policies ---------------------------------------------------------------------------------------------------------

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Policy:
    """Formats, rules and loss scale under one name. Create one with `policy`.

    Attributes:
        param: format in which parameters are stored.
        compute: format in which ``lower`` operations run.
        output: format of a model's outputs.
        rules: the user's own rules; the first match wins, and the default table comes last.
        loss_scale: how the loss is scaled.
        name: a label; comparison ignores it.
    """

    param: str
    compute: str
    output: str
    rules: tuple[Rule, ...] = ()
    loss_scale: LossScale = field(default_factory=LossScale.none)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for key in ("param", "compute", "output"):
            object.__setattr__(self, key, format_of(getattr(self, key), where=f"policy({key}=)").name)
        object.__setattr__(self, "rules", parse_rules(self.rules))
        checks = [
            ("loss_scale", self.loss_scale, isinstance(self.loss_scale, LossScale), "a LossScale"),
            ("name", self.name, isinstance(self.name, str), "a string"),
        ]
        check_arguments("policy", checks, InvalidTypeError)
        what = "bfloat16 has the range of float32: a dynamic loss scale cannot help it"
        allowed = "LossScale.skip_nonfinite(), the default; or LossScale.none(), which checks nothing"
        fits = self.compute != "bfloat16" or not self.loss_scale.dynamic
        check_arguments("policy", [("loss_scale", self.loss_scale, fits, allowed)], what=what)

    def decide(self, operation: str, path: str = "") -> Decision:
        """Return the class of a canonical operation at a module or scope path under this policy, and the reason.

        >>> policy("mixed_float16").decide("matmul").op_class
        'lower'
        """
        names = {"operation": operation, "path": path}
        checks = [(key, value, isinstance(value, str), "a string") for key, value in names.items()]
        check_arguments("Policy.decide", checks, InvalidTypeError)
        return decide(self.rules, operation, path)

    @property
    def own_rules(self) -> tuple[Rule, ...]:
        """The rules that the user wrote, without those that the formats imply.

        >>> policy("half", rules={"head/*": "full"}).own_rules
        (Rule(pattern='head/*', op_class='full'),)
        """
        defaults = default_rules(self.param, self.compute, self.output)
        return tuple(rule for rule in self.rules if rule not in defaults)

    @property
    def param_dtype(self) -> Any:
        """``param`` as a NumPy dtype, as in jmp and haiku. Without ml_dtypes, bfloat16 and float8 are names.

        >>> policy("O2").param_dtype, str(policy("mixed_float16").output_dtype)
        (dtype('float16'), 'float32')
        """
        return _numpy_dtype(self.param)

    @property
    def compute_dtype(self) -> Any:
        """``compute`` as a NumPy dtype; see `param_dtype`."""
        return _numpy_dtype(self.compute)

    @property
    def output_dtype(self) -> Any:
        """``output`` as a NumPy dtype; see `param_dtype`."""
        return _numpy_dtype(self.output)

    @property
    def casts(self) -> bool:
        """Whether any format differs from float32."""
        return {self.param, self.compute, self.output} != {"float32"}

    @property
    def needs_master_weights(self) -> bool:
        """Whether parameters have 16 bits or fewer, so that the optimizer keeps float32 master weights."""
        return format_of(self.param).is_low

    def cast_to_param(self, tree: Tree) -> Tree:
        """Cast the floating-point leaves of a tree, or a module's parameters, to ``param``; leave the rest unchanged.

        Works on arrays, containers and modules of any loaded framework, also while JAX or TensorFlow traces.

        Raises:
            InvalidTypeError: the tree holds arrays of a framework without an adapter.
        """
        return _cast(tree, self.param)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Cast the floating-point leaves of a tree to ``compute``; see `cast_to_param`."""
        return _cast(tree, self.compute)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Cast the floating-point leaves of a tree to ``output``; see `cast_to_param`."""
        return _cast(tree, self.output)

    def to_fsdp(self, *, reduce: Any = "float32", output: Any = None, cast_forward_inputs: bool = True) -> Any:
        """Return the ``torch.distributed.fsdp.MixedPrecisionPolicy`` of this policy, for ``fully_shard(mp_policy=)``.

        Parameters are gathered in ``compute``, so communication takes half the bytes, and stay stored in ``param``.

        >>> found = policy("mixed_bfloat16").to_fsdp()
        >>> found.param_dtype, found.reduce_dtype, found.output_dtype
        (torch.bfloat16, torch.float32, torch.float32)

        A policy that stores norms in float32 and the rest in 16 bits, such as ``O2``, leaves the formats of parameters,
        inputs and outputs to `polyamp.convert`: only ``reduce_dtype`` is set.

        Args:
            reduce: the format in which gradients are summed over ranks. float16 can overflow; the step is then skipped.
            output: the format that a sharded module's outputs are cast to; None is the policy's ``output``.
            cast_forward_inputs: whether a sharded module's inputs are cast to ``compute``, the format of its gathered
                parameters.

        Raises:
            InvalidValueError: a format is unknown.
            UnsupportedError: FSDP does not compute or sum in that format.
            MissingFrameworkError: PyTorch is not installed.
        """
        from polyamp import adapters

        adapter: Any = adapters.adapter_named("torch")
        return adapter.fsdp_policy(
            self,
            reduce=_format(reduce, "policy.to_fsdp(reduce=)"),
            output=self.output if output is None else _format(output, "policy.to_fsdp(output=)"),
            cast_forward_inputs=cast_forward_inputs,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as JSON values.

        >>> Policy.from_dict(policy("O2").to_dict()) == policy("O2")
        True
        """
        return {
            "name": self.name,
            "param": self.param,
            "compute": self.compute,
            "output": self.output,
            "rules": dict(self.rules),
            "loss_scale": self.loss_scale.to_dict(),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Policy:
        """Build a policy from the result of `to_dict`.

        Raises:
            InvalidValueError: a field is missing, unknown or out of range.
        """
        wanted = ("name", "param", "compute", "output", "rules", "loss_scale")
        with reading(saved, where="Policy.from_dict(saved)"):
            names = list(saved) if isinstance(saved, Mapping) else None
        checks = [("saved", names or saved, names is not None and set(names) == set(wanted), ", ".join(wanted))]
        check_arguments("Policy.from_dict", checks, what="a saved policy has exactly these fields")
        return cls(**{**saved, "loss_scale": LossScale.from_dict(saved["loss_scale"])})

    def __str__(self) -> str:
        """Return a text that `policy` parses back to an equal policy."""
        return _write(self.param, self.compute, self.output, self.rules, self.loss_scale, self.name)

    def __enter__(self) -> Policy:
        enter(self, self)
        return self

    def __exit__(self, *_: object) -> None:
        leave(self)


def policy(
    spec: Any = None,
    /,
    *,
    param: Any = None,
    compute: Any = None,
    output: Any = None,
    rules: Mapping[str, str] | Iterable[tuple[str, str]] | None = None,
    loss_scale: LossScale | float | str | None = None,
    name: str | None = None,
    **mistaken: Any,
) -> Policy:
    """Create a policy from a name in any common dialect, from another policy, or from formats.

    >>> str(policy("fp16")), str(policy("p=f32,c=bf16,o=f32"))
    ('mixed_float16', 'mixed_bfloat16')
    >>> policy("O2").param, policy("O2").decide("batch_norm").op_class
    ('float16', 'inner')
    >>> policy("mixed_float16", rules={"softmax": "lower"}).decide("softmax").op_class
    'lower'

    Args:
        spec: a `Policy`; a Keras name (``float32 mixed_float16 mixed_bfloat16 float16 bfloat16``); a jmp string
            (``params=float32,compute=float16,output=float32``, ``p=f32,c=bf16,o=f32``, ``half``, ``full``); an Apex
            level (``O0 O1 O2 O3``); a trainer's word (``fp16 bf16 16-mixed bf16-mixed 16-true bf16-true amp_fp16``);
            ``str()`` of a policy; or a
            ``jmp.Policy`` or Keras ``DTypePolicy``. None without other arguments is the current policy. A `Policy`
            without other arguments is returned unchanged.
        param: format of stored parameters: a name, or a framework's dtype.
        compute: format of ``lower`` operations; by default ``param``, as in jmp.
        output: format of outputs; by default ``compute``, as in jmp.
        rules: classes by operation name or path glob; they take precedence over the rules of ``spec``.
        loss_scale: how the loss is scaled; a number is a fixed scale, and "dynamic" means ``LossScale()``. By default
            dynamic if ``compute`` is float16, else none.
        name: a label.
        **mistaken: other keyword arguments: refused, with a hint at the one that was meant.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        InvalidValueError: a word is unknown, repeated, blank or contradictory.
        UnsupportedError: a keyword argument does not exist.
    """
    where = "policy(spec)"
    if mistaken:
        raise unknown_options([*mistaken], _ARGUMENTS, where=where, elsewhere=_OF_JMP)
    without_more = rules is None and loss_scale is None and name is None
    if without_more and param is None and compute is None and output is None and isinstance(spec, Policy):
        return spec
    given = {"param": param, "compute": compute, "output": output}
    formats = {key: _format(value, f"policy({key}=)") for key, value in given.items() if value is not None}
    own_rules = () if rules is None else parse_rules(rules)
    if not isinstance(spec, Policy | str | None):
        with reading(spec, where=where):
            spec, formats = _of_another_library(spec, formats)
    if spec is None and not formats and not own_rules and loss_scale is None and name is None:
        return current_policy()
    if isinstance(spec, Policy):
        base = _from_policy(spec, formats)
    elif spec is None or isinstance(spec, str):
        base = _from_words(_Words() if spec is None else _read(spec, where=where), formats, where)
    else:
        raise wrong_type(
            spec, where=where, allowed="a Policy or a string", fix='pass a name, for example "mixed_float16"'
        )
    kept = tuple(rule for rule in base.rules if rule.pattern not in {own.pattern for own in own_rules})
    return replace(
        base,
        rules=own_rules + kept,
        loss_scale=base.loss_scale if loss_scale is None else LossScale.of(loss_scale, where="policy(loss_scale=)"),
        name=base.name if name is None else name,
    )


_ARGUMENTS = ("param", "compute", "output", "rules", "loss_scale", "name")
_OF_JMP = {"param_dtype": "param", "params": "param", "compute_dtype": "compute", "output_dtype": "output"}
"""Names of formats in jmp and flax, for errors."""

# Each ``with policy:`` and each region: the policy, the object that was entered, what that needs in order to leave, and
# the entry around this one. One variable, because a context keeps every variable that was ever set.
Entry = tuple[Policy, object, Any, Any]
_INNERMOST: ContextVar[Entry | None] = ContextVar("polyamp_policies", default=None)
_global_policy = Policy("float32", "float32", "float32")


def current_policy() -> Policy:
    """Return the innermost ``with policy:`` of this thread or async task, else the global policy (at first float32).

    >>> with policy("mixed_bfloat16"):
    ...     print(current_policy())
    mixed_bfloat16
    """
    entry = _INNERMOST.get()
    return _global_policy if entry is None else entry[0]


def enter(policy: Policy, owner: object, held: Any = None) -> None:
    """Make a policy the current one until `leave`, which returns what is held."""
    _INNERMOST.set((policy, owner, held, _INNERMOST.get()))


def leave(owner: object) -> Any:
    """Forget the last entry of an object, which need not be the last of all: two generators end in any order."""
    entry = _INNERMOST.get()
    later: list[Entry] = []
    while entry is not None and entry[1] is not owner:
        later.append(entry)
        entry = entry[3]
    if entry is None:
        return None  # it was entered in another task
    outer = entry[3]
    for policy, other, held, _ in reversed(later):
        outer = policy, other, held, outer
    _INNERMOST.set(outer)
    return entry[2]


def in_policy() -> bool:
    """Return whether a ``with policy:`` is active here.

    >>> with policy("float32"):
    ...     in_policy()
    True
    """
    return _INNERMOST.get() is not None


def set_global_policy(spec: Policy | str) -> Policy:
    """Set the policy that applies outside any ``with policy:``, in every thread, and return it.

    >>> set_global_policy("float32").compute
    'float32'
    """
    global _global_policy
    _global_policy = policy(spec)
    return _global_policy


def _from_words(words: _Words, formats: dict[str, str], where: str) -> Policy:
    named = words.formats
    for key, value in formats.items():
        contradicts_word = words.name is not None and key == "compute"
        if key in named and named[key] != value and (contradicts_word or words.name is None):
            raise InvalidValueError(
                f"two formats for {key}",
                where=f"{where} and policy({key}=)",
                found=f"{named[key]} and {value}",
                allowed="one of them",
                fix=f"leave {key}= out, or name a policy that agrees with it",
            )
    param = formats.get("param", named.get("param", "float32"))
    compute = formats.get("compute", named.get("compute", param))
    output = formats.get("output", named.get("output", compute))
    rules = default_rules(param, compute, output) if words.rules is None else words.rules
    scale = words.loss_scale or default_loss_scale(compute)
    return Policy(param, compute, output, rules, scale, words.label)


_BY_WORD = {word: _from_words(_read(word, where=""), {}, "") for word in WORDS}


def as_policy(spec: Policy | str) -> Policy:
    """Return ``policy(spec)``, fast for known words: a region may be entered by a word at every step."""
    if isinstance(spec, Policy):
        return spec
    return (_BY_WORD.get(spec) if isinstance(spec, str) else None) or policy(spec)


def _from_policy(spec: Policy, formats: dict[str, str]) -> Policy:
    """Replace formats of a policy. The default rules and loss scale follow them, unless they were set explicitly."""
    param, compute, output = (formats.get(key, getattr(spec, key)) for key in ("param", "compute", "output"))
    rules, scale = spec.rules, spec.loss_scale
    if rules == default_rules(spec.param, spec.compute, spec.output):
        rules = default_rules(param, compute, output)
    if scale == default_loss_scale(spec.compute):
        scale = default_loss_scale(compute)
    return Policy(param, compute, output, rules, scale, spec.name)


def _of_another_library(spec: Any, formats: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """Convert a jmp policy to formats, and a Keras policy or a framework's dtype to a name; return others unchanged."""
    keys = {"param": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
    if isinstance(spec, type) or not all(hasattr(spec, name) for name in keys.values()):
        keras_name = getattr(spec, "name", None) if hasattr(spec, "variable_dtype") else None
        dtype = name_of_dtype(spec)
        if keras_name is None and dtype in ("float16", "bfloat16"):
            raise InvalidValueError(
                "a dtype can mean two policies",
                where="policy(spec)",
                found=shown(spec),
                allowed=f'"mixed_{dtype}", which stores parameters in float32; "{dtype}", which stores them in {dtype}',
                fix=f'write "mixed_{dtype}" for what torch.autocast does',
            )
        return keras_name or dtype or spec, formats
    own = {key: _format(getattr(spec, name), f"policy(spec).{name}") for key, name in keys.items()}
    return None, {**own, **formats}


def _format(value: Any, where: str) -> str:
    with reading(value, where=where):
        return format_of(value if isinstance(value, str) else name_of_dtype(value) or value, where=where).name


def _numpy_dtype(name: str) -> Any:
    import numpy

    extended = sys.modules.get("ml_dtypes")  # JAX and TensorFlow bring it
    try:
        return numpy.dtype(getattr(extended, name, name))
    except TypeError:
        return name


def _cast(tree: Tree, format_name: str) -> Tree:
    from polyamp import adapters

    if tracing := adapters.tracing():
        return tracing.cast(tree, format_name)
    hidden = getattr(tree, "__dict__", {}).values()  # for an object that is not a container, its attributes
    try:
        for adapter in adapters.adapters_within(tree) or adapters.adapters_within(*hidden):
            tree = adapter.cast(tree, format_name)
    except RecursionError as error:
        raise adapters.too_deep("policy.cast_to_compute(tree), or another cast") from error
    return tree


# --- reports ----------------------------------------------------------------------------------------------------------


def chosen_policy(policy: Policy | None, call: str, *, stacklevel: int = 2) -> Policy:
    """Return a policy, or else the current one; warn once if nobody chose that one and it changes nothing."""
    chosen = current_policy() if policy is None else policy
    if policy is None and not in_policy() and not chosen.casts:
        verb = call.partition("(")[0]
        warn_once(
            f"{call} without a policy takes the current one, {chosen}, which changes nothing: pass a policy, as in "
            f"{_WITH_POLICY[verb]}, or call polyamp.set_global_policy first.",
            stacklevel=stacklevel + 1,
        )
    return chosen


_WITH_POLICY = {
    "autocast": 'polyamp.autocast("mixed_float16")',
    "rewrite": 'polyamp.rewrite(fn, policy="mixed_float16")',
    "value_and_grad": 'polyamp.value_and_grad(fun, "mixed_float16")',
}


# --- an optimizer that was wrapped for another policy -----------------------------------------------------------------
#
# An optimizer and the code around the forward pass get their policies separately, so one of them can be forgotten::
#
#     opt = polyamp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))  # the current policy: no scaling
#     with polyamp.autocast("mixed_float16"):
#         loss = model(x).mean()
#     opt.backward(loss)
#     opt.step()  # a warning: without a loss scale, small float16 gradients round to zero


def report_missing_scale(
    settings: LossScale, compute: str | None, forward: Policy | None = None, *, stacklevel: int = 2
) -> None:
    """Warn once if the forward pass needs a loss scale and the optimizer was wrapped for another format, without one.

    Two different 16-bit formats with a loss scale train correctly.

    Args:
        settings: the optimizer's loss scale.
        compute: the compute format that it was wrapped for.
        forward: the policy of the forward pass. None is the policy of the rewrite that traces the caller, or else of
            the region around the caller; without either, nothing is checked.
        stacklevel: as in `warnings.warn`, counted from this function.
    """
    forward = forward or _traced_for.get() or (current_policy() if in_policy() else None)
    if forward is None or compute in (None, forward.compute) or settings.scales:
        return
    if forward.compute == "float16" and forward.loss_scale.scales:
        warn_once(
            "the forward pass computes in float16, and the optimizer was wrapped without a loss scale. What to do: "
            f"call polyamp.wrap_optimizer(optimizer, policy) with {forward}: else small gradients round to zero.",
            stacklevel=stacklevel + 1,
        )


_traced_for: ContextVar[Policy | None] = ContextVar("polyamp_traced_for", default=None)


@contextmanager
def traced_for(policy: Policy) -> Iterator[None]:
    """Trace the code in this block to rewrite it under a policy: its forward pass will compute in that policy."""
    token = _traced_for.set(policy)
    try:
        yield
    finally:
        _traced_for.reset(token)


def is_rewritten() -> bool:
    """Return whether the caller is traced to be rewritten; the rewrite then tests how its loss is scaled."""
    return _traced_for.get() is not None
