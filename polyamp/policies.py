"""A precision policy: the formats of stored parameters, matrix work and outputs, the rules, and the loss scale."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from polyamp.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_arguments,
    reading,
    refuses_unreadable,
    shown,
    unknown_options,
    wrong_type,
)
from polyamp.flow import Decision, decide
from polyamp.formats import format_of, name_of_dtype
from polyamp.nesting import too_deep
from polyamp.policy_words import WORDS, Words, default_loss_scale, default_rules, read, write
from polyamp.rules import Rule, parse_rules
from polyamp.settings import LossScale

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
        what = "bfloat16 needs no loss scale: it has the range of float32, so a dynamic one cannot help it"
        allowed = "LossScale.skip_nonfinite(), the default; or LossScale.none(), which checks nothing"
        fits = self.compute != "bfloat16" or not self.loss_scale.dynamic
        check_arguments("policy", [("loss_scale", self.loss_scale, fits, allowed)], what=what)

    @refuses_unreadable
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

    @refuses_unreadable
    def cast_to_param(self, tree: Tree) -> Tree:
        """Cast the floating-point leaves of a tree, or a module's parameters, to ``param``; leave the rest unchanged.

        Works on arrays, containers and modules of any loaded framework, also while JAX or TensorFlow traces.

        Raises:
            InvalidTypeError: the tree holds arrays of a framework without an adapter.
        """
        return _cast(tree, self.param)

    @refuses_unreadable
    def cast_to_compute(self, tree: Tree) -> Tree:
        """Cast the floating-point leaves of a tree to ``compute``; see `cast_to_param`."""
        return _cast(tree, self.compute)

    @refuses_unreadable
    def cast_to_output(self, tree: Tree) -> Tree:
        """Cast the floating-point leaves of a tree to ``output``; see `cast_to_param`."""
        return _cast(tree, self.output)

    @refuses_unreadable
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
    @refuses_unreadable
    def from_dict(cls, saved: Mapping[str, Any]) -> Policy:
        """Build a policy from the result of `to_dict`.

        Raises:
            InvalidValueError: a field is missing, unknown or out of range.
        """
        wanted = ("name", "param", "compute", "output", "rules", "loss_scale")
        names = list(saved) if isinstance(saved, Mapping) else None
        checks = [("saved", names or saved, names is not None and set(names) == set(wanted), ", ".join(wanted))]
        check_arguments("Policy.from_dict", checks, what="a saved policy has exactly these fields")
        return cls(**{**saved, "loss_scale": LossScale.from_dict(saved["loss_scale"])})

    def __str__(self) -> str:
        """Return a text that `policy` parses back to an equal policy."""
        return write(self.param, self.compute, self.output, self.rules, self.loss_scale, self.name)

    def __enter__(self) -> Policy:
        enter(self, self)
        return self

    def __exit__(self, *_: object) -> None:
        leave(self)


def is_automatic(spec: object) -> bool:
    """Return whether a name stands for the fastest right policy of the loaded frameworks.

    >>> is_automatic(" Auto"), is_automatic("mixed_float16")
    (True, False)
    """
    return isinstance(spec, str) and spec.strip().lower() == "auto"


@refuses_unreadable
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
            ``str()`` of a policy; ``auto``, which is ``mixed_bfloat16``, ``mixed_float16`` or ``float32``: the fastest
            that is right on the devices of the loaded frameworks, as ``polyamp doctor --test`` measured (untested, the
            devices' units decide); or a ``jmp.Policy`` or Keras ``DTypePolicy``. None without other arguments is the
            current policy. A `Policy` without other arguments is returned unchanged.
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
    if is_automatic(spec):
        from polyamp.auto import automatic

        spec = automatic()
    if isinstance(spec, Policy):
        base = _from_policy(spec, formats)
    elif spec is None or isinstance(spec, str):
        base = _from_words(Words() if spec is None else read(spec, where=where), formats, where)
    else:
        raise wrong_type(
            spec, where=where, allowed="a Policy or a string", fix='pass a name, for example "mixed_float16"'
        )
    other_rules = tuple(rule for rule in base.rules if rule.pattern not in {own.pattern for own in own_rules})
    return replace(
        base,
        rules=own_rules + other_rules,
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


def enter(policy: Policy, owner: object, payload: Any = None) -> None:
    """Make a policy the current one until `leave(owner)`, which returns ``payload``."""
    _INNERMOST.set((policy, owner, payload, _INNERMOST.get()))


def leave(owner: object) -> Any:
    """Undo an owner's last `enter`, even if others entered since: two generators can end in any order."""
    entry = _INNERMOST.get()
    if entry is not None and entry[1] is owner:  # as almost always
        _INNERMOST.set(entry[3])
        return entry[2]
    later: list[Entry] = []
    while entry is not None and entry[1] is not owner:
        later.append(entry)
        entry = entry[3]
    if entry is None:
        return None  # it was entered in another task
    outer = entry[3]
    for policy, other, payload, _ in reversed(later):
        outer = policy, other, payload, outer
    _INNERMOST.set(outer)
    return entry[2]


def in_policy() -> bool:
    """Return whether a ``with policy:`` is active here."""
    return _INNERMOST.get() is not None


def set_global_policy(spec: Policy | str) -> Policy:
    """Set the policy that applies outside any ``with policy:``, in every thread, and return it.

    >>> set_global_policy("float32").compute
    'float32'
    """
    global _global_policy
    _global_policy = policy(spec)
    return _global_policy


def _from_words(words: Words, formats: dict[str, str], where: str) -> Policy:
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


_BY_WORD = {word: _from_words(read(word, where=""), {}, "") for word in WORDS}


def as_policy(spec: Policy | str) -> Policy:
    """Return ``policy(spec)``, fast for known words, since a region can be entered by a word at every step."""
    if type(spec) is Policy:
        return spec
    return (_BY_WORD.get(spec) if type(spec) is str else None) or policy(spec)


def _from_policy(spec: Policy, formats: dict[str, str]) -> Policy:
    """Replace formats of a policy, and its rules and loss scale if these are the defaults of the old formats."""
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
        cast: Tree = tracing.cast(tree, format_name)
        return cast
    hidden = getattr(tree, "__dict__", {}).values()  # for an object that is not a container, its attributes
    try:
        for adapter in adapters.adapters_within(tree) or adapters.adapters_within(*hidden):
            tree = adapter.cast(tree, format_name)
    except RecursionError as error:
        raise too_deep("policy.cast_to_compute(tree), or another cast") from error
    return tree
