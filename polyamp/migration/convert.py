"""Convert the source of one program: every dialect reads it, then all edits are applied, or none."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from polyamp.migration import apex, apex_parts, flax, jmp, keras, tensorflow1, torch_amp, trainers
from polyamp.migration.edits import applied
from polyamp.migration.imports import mended
from polyamp.migration.program import Program, dotted_name, is_in
from polyamp.migration.report import Migration, Place

DIALECTS = (apex, apex_parts, torch_amp, keras, tensorflow1, jmp, flax)
ROOTS: tuple[str, ...] = tuple(root for dialect in DIALECTS for root in dialect.ROOTS)
WORDS = re.compile(
    rb"\bapex\b|cuda\.amp|autocast|GradScaler|custom_[fb]wd|mixed_precision|LossScale|\bjmp\b|DynamicScale|deepspeed"
    rb"|get_scaled_loss|Trainer\(|Fabric\(|Accelerator\(|TrainingArguments\("
)
"""A file without any of these words needs no parser."""

Converter = Callable[[Program], None]


def migrate_source(source: bytes, path: str = "program.py") -> Migration:
    """Convert the source of one program.

    >>> source = b"import torch\\n\\nwith torch.autocast('cuda', torch.float16):\\n    train()\\n"
    >>> print(migrate_source(source).after.decode(), end="")
    import polyamp
    <BLANKLINE>
    with polyamp.autocast("mixed_float16"):
        train()

    Args:
        source: the bytes of a Python file.
        path: the name of the file, for the diff and the report.
    """
    if not WORDS.search(source):
        return Migration(path, source, source)
    try:
        program = Program(source)
    except (cst.ParserSyntaxError, SyntaxError, ValueError, LookupError, RecursionError) as error:
        return Migration(path, source, source, failure=f"not parsed: {_first_line(error)}")
    for dialect in DIALECTS:
        dialect.convert(program)
    trainers.convert(program)
    _refuse_the_rest(program)
    return _migration(program, source, path)


def _migration(program: Program, source: bytes, path: str) -> Migration:
    refused, named = tuple(sorted(set(program.refused))), tuple(program.named)
    encoding = program.module.encoding
    if refused or not (program.edits or program.regions):
        return Migration(path, source, source, refused, (), named, encoding=encoding)
    converted = Program(applied(program))
    after = mended(program, converted, ROOTS).bytes
    failure = _wrong(converted, after)
    if failure:
        refused = (
            Place(1, f"the conversion of this file failed: {failure}", "convert it by hand, and report the file"),
        )
        after = source
    return Migration(path, source, after, refused, tuple(program.notes), named, encoding=encoding)


def _refuse_the_rest(program: Program) -> None:
    """Refuse every use of an old interface that no dialect has claimed."""
    for use in program.uses(ROOTS):
        if use.node in program.ambiguous:
            program.refuse(
                use.node, f"{use.name}, whose name is also bound to something else", "one import, or two names"
            )
        elif use.node not in program.claimed:
            for dialect in DIALECTS:
                if is_in(use.name, dialect.ROOTS):
                    program.refuse(use.node, f"{use.name} cannot be converted here", dialect.WRITE)
    for star in program.find(cst.ImportFrom):
        if not isinstance(star.names, cst.ImportStar):
            continue
        module = dotted_name(star.module) if star.module is not None and not star.relative else None
        if module is not None and is_in(module, ROOTS):
            program.refuse(star, f"from {module} import *", "import each name by itself, and run polyamp migrate again")


def _wrong(converted: Program, after: bytes) -> str:
    """Return what is wrong with a converted program; empty if it compiles and has nothing left to convert."""
    try:
        compile(after, "converted.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return _first_line(error)
    left = converted.uses(ROOTS)
    return f"{left[0].name} is still there" if left else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
