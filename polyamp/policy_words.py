"""The spellings of policies: words of many libraries, pairs of formats, and the text of a policy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from polyamp.errors import InvalidValueError, did_you_mean, shown
from polyamp.formats import format_of
from polyamp.rules import Rule, parse_rules
from polyamp.settings import LossScale

_FIELDS = {"p": "param", "param": "param", "params": "param", "c": "compute", "compute": "compute"}
_FIELDS |= {"o": "output", "output": "output"}


@dataclass(frozen=True)
class Words:
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


def _word(formats: str, loss_scale: LossScale | None = None) -> Words:
    return Words(dict(zip(("param", "compute", "output"), formats.split(), strict=True)), None, loss_scale)


_WORDS: dict[str, Words] = {
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


def read(text: str, *, where: str) -> Words:
    """Parse one policy text: a word or ``key=format`` pairs, then optionally a JSON object of further settings."""
    head, brace, tail = text.partition("{")
    words = _read_pairs(head, where) if "=" in head else _read_word(head, where)
    if not brace:
        return words
    settings = _read_settings(brace + tail, where)
    rules = parse_rules(settings["rules"], where=where) if "rules" in settings else words.rules
    scale = LossScale.from_dict(settings["loss_scale"]) if "loss_scale" in settings else words.loss_scale
    return Words(words.formats, rules, scale, words.name, settings.get("name", ""))


def write(param: str, compute: str, output: str, rules: tuple[Rule, ...], loss_scale: LossScale, label: str) -> str:
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


def _read_word(text: str, where: str) -> Words:
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
    return Words(dict(meaning.formats), meaning.rules, meaning.loss_scale, name)


def _read_pairs(text: str, where: str) -> Words:
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
    return Words(formats)


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
        allowed=f"{', '.join(_COMMON)}, and others of docs/reference/policies.md; or params=FORMAT,compute=FORMAT,"
        "output=FORMAT",
        fix=f"{hint}{'Else use' if hint else 'use'} one name of a policy, or each key once",
    )
