"""`polyamp migrate` converts whole programs or none, by the names that they import. All other text stays as it is.

The programs in ``support/migrate/before`` are written as users write them; ``after`` has what each becomes.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp.migration.convert import migrate_source
from polyamp.migration.program import Program
from polyamp.migration.report import Migration

pytestmark = pytest.mark.once  # libcst parses every version of Python on each

PROGRAMS = Path(__file__).parents[1] / "support" / "migrate"
NAMES = sorted(path.stem for path in (PROGRAMS / "before").glob("*.py"))


def migrated(source: str) -> Migration:
    return migrate_source(source.encode())


def after(source: str) -> str:
    done = migrated(source)
    assert not done.refused, done.refused
    return done.after.decode()


@pytest.mark.parametrize("name", NAMES)
def test_a_program_becomes_what_is_written_beside_it(name: str) -> None:
    before, expected = ((PROGRAMS / folder / f"{name}.py").read_bytes() for folder in ("before", "after"))
    done = migrate_source(before, f"{name}.py")
    assert done.outcome == "converted", (done.refused, done.notes)
    assert done.after.decode() == expected.decode()


@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_finds_nothing_to_convert(name: str) -> None:
    done = migrate_source((PROGRAMS / "after" / f"{name}.py").read_bytes())
    assert done.outcome == "unchanged"
    assert done.before == done.after


AUTOCASTS = {
    "torch.autocast('cuda')": '"mixed_float16"',
    "torch.autocast('cpu')": '"mixed_bfloat16"',
    "torch.autocast('cuda', dtype=torch.bfloat16)": '"mixed_bfloat16"',
    "torch.amp.autocast('cuda', torch.float16)": '"mixed_float16"',
    "torch.cuda.amp.autocast()": '"mixed_float16"',
    "torch.cuda.amp.autocast(False)": '"float32"',
    "torch.cuda.amp.autocast(enabled=args.amp)": '"mixed_float16" if args.amp else "float32"',
    "torch.cuda.amp.autocast(args.amp, torch.half)": '"mixed_float16" if args.amp else "float32"',
    "torch.cpu.amp.autocast()": '"mixed_bfloat16"',
    "torch.autocast('cuda', dtype=kind)": 'polyamp.policy(param="float32", compute=kind, output="float32")',
    "torch.autocast('cuda', torch.half if old else torch.bfloat16)": '"mixed_float16" if old else "mixed_bfloat16"',
    "torch.autocast('cuda', enabled=a or b)": '"mixed_float16" if a or b else "float32"',
    "torch.autocast('cuda', enabled=a if b else c)": '"mixed_float16" if (a if b else c) else "float32"',
}


@pytest.mark.parametrize("call", AUTOCASTS)
def test_a_region_of_torch_becomes_a_policy(call: str) -> None:
    assert after(f"import torch\nwith {call}:\n    torch.ones(1)\n") == (
        f"import torch\nimport polyamp\nwith polyamp.autocast({AUTOCASTS[call]}):\n    torch.ones(1)\n"
    )


IMPORTS = {
    "from torch.cuda.amp import autocast\nwith autocast(): pass\n": "import polyamp\n",
    "from torch.cuda.amp import autocast as A\nwith A(): pass\n": "import polyamp\n",
    "import torch.cuda.amp as amp\nwith amp.autocast(): pass\n": "import polyamp\n",
    "import torch.nn\nimport torch\nimport torch.cuda.amp\nwith torch.cuda.amp.autocast(): torch.nn\n": (
        "import torch.nn\nimport torch\nimport polyamp\n"
    ),
    "from torch.cuda import amp\nwith amp.autocast(): pass\n": "import polyamp\n",
    "from torch import amp, nn\nx = nn\nwith amp.autocast('cuda'): pass\n": (
        "from torch import nn\nimport polyamp\nx = nn\n"
    ),
    "import os\nimport torch\nwith torch.autocast('cuda'): os\n": "import os\nimport polyamp\n",
    "import polyamp\nimport torch\nwith torch.autocast('cuda'): pass\n": "import polyamp\n",
    '"""Doc."""\nfrom __future__ import annotations\nimport torch\nx: int = 1\nwith torch.autocast("cuda"): pass\n': (
        '"""Doc."""\nfrom __future__ import annotations\nimport polyamp\nx: int = 1\n'
    ),
    "try:\n    from torch.cuda.amp import autocast\n    a = 1\nexcept ImportError:\n    a = 0\nwith autocast(): a\n": (
        "import polyamp\n\ntry:\n    a = 1\nexcept ImportError:\n    a = 0\n"
    ),
}


@pytest.mark.parametrize("source", IMPORTS)
def test_unused_imports_go_and_polyamp_comes_once(source: str) -> None:
    expected = IMPORTS[source]
    assert after(source).partition("with ")[0] == expected
    assert after(source).count("import polyamp") == 1


NOT_OURS = [
    "def autocast(): pass\nwith autocast(): pass\n",
    "from torch.cuda.amp import autocast\n\ndef train(autocast):\n    with autocast():\n        pass\n",
    "from mine import amp\namp.initialize(1, 2)\n",
    "from . import apex\nfrom .apex import amp\namp.initialize(1, 2)\n",
    "class GradScaler: pass\nscaler = GradScaler()\nscaler.scale(1).backward()\n",
    "text = 'from apex import amp'  # torch.cuda.amp.autocast()\n",
    "import tensorflow as tf\ntf.keras.mixed_precision.set_global_policy('mixed_float16')\n",
    "import torch\nprint(torch.is_autocast_enabled('cpu'))\n",
    "import apex.contrib.sparsity\napex.contrib.sparsity.ASP.init()\n",
]


@pytest.mark.parametrize("source", NOT_OURS)
def test_names_that_only_look_like_an_old_interface_are_not_touched(source: str) -> None:
    done = migrated(source)
    assert (done.outcome, done.after) == ("unchanged", done.before)


LOOP = """
import torch
from apex import amp
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
model, opt = amp.initialize(model, opt, {options})
loss = model(torch.ones(1, 2)).sum()
with amp.scale_loss(loss, opt{more}) as scaled:
    {body}
opt.step()
"""


def loop(options: str = "opt_level='O1'", more: str = "", body: str = "scaled.backward()") -> str:
    return LOOP.format(options=options, more=more, body=body)


OPTIONS = {
    "opt_level='O1'": "opt = polyamp.wrap_optimizer(opt, 'O1')\nwith polyamp.autocast('O1'):\n    loss = model(",
    "opt_level='O2'": "model = polyamp.convert(model, 'O2')\nopt = polyamp.wrap_optimizer(opt, 'O2')\nloss = model(",
    "opt_level='O2', loss_scale='dynamic'": "opt = polyamp.wrap_optimizer(opt, 'O2')\n",
    "opt_level='O2', loss_scale='128.0'": "opt = polyamp.wrap_optimizer(opt, 'O2', loss_scale=128.0)\n",
    "opt_level='O1', loss_scale=64": "opt = polyamp.wrap_optimizer(opt, 'O1', loss_scale=64.0)\n",
    "opt_level='O1', min_loss_scale=1.0": 'loss_scale=polyamp.LossScale.like("apex", min=1.0))\n',
    "opt_level='O2', keep_batchnorm_fp32=False": 'polyamp.policy(\'O2\', rules={"batch_norm": "lower"})',
    "opt_level='O2', master_weights=False": "polyamp.wrap_optimizer(opt, 'O2', master_weights=False)",
    "opt_level='O0', verbosity=0, num_losses=3": "opt = polyamp.wrap_optimizer(opt, 'O0')\nloss",
    "enabled=fast, opt_level='O2'": 'if (\'O2\' if fast else "O0") in ("O2", "O3"):\n    model = polyamp.convert(',
    "opt_level=level": 'if level in ("O2", "O3"):\n    model = polyamp.convert(model, level)\n',
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_initialize(options: str) -> None:
    assert OPTIONS[options] in after(loop(options))


BODIES = {
    ("", "scaled.backward()"): "\nopt.backward(loss)\n",
    (", loss_id=2", "scaled.backward(retain_graph=True)"): "\nopt.backward(loss, loss_id=2, retain_graph=True)\n",
    (", delay_unscale=late", "scaled.backward()"): "\nopt.backward(loss)\n",
    ("", "print(scaled); scaled.backward()"): "\nscaled = opt.scale(loss)\nprint(scaled); scaled.backward()\n",
}


@pytest.mark.parametrize(("more", "body"), BODIES)
def test_blocks_of_scale_loss(more: str, body: str) -> None:
    assert BODIES[more, body] in after(loop(more=more, body=body))


REFUSED = {
    loop("cast_model_type=torch.float16"): (6, "cast_model_type"),
    loop("**options"): (6, "arguments that cannot be told"),
    loop(body="scaled.backward(); print(list(amp.master_params(opt)))"): (9, "master_params"),
    "from apex import amp\nmodel, opt = both = amp.initialize(model, opt)\n": (2, "not an assignment"),
    "from apex import amp\n\n@amp.float_function\ndef nms(): pass\n": (3, "amp.float_function"),
    "from apex.fp16_utils import *\nnetwork_to_half(model)\n": (1, "import *"),
    "import torch\nfast = torch.cuda.amp.autocast\n": (2, "without a call"),
    "from torch.cuda.amp import autocast\nif old:\n    autocast = nothing\nwith autocast():\n    pass\n": (
        4,
        "also bound",
    ),
    "if old:\n    from torch.cuda.amp import autocast\nelse:\n    from torch.amp import autocast\nautocast('cuda')\n": (
        5,
        "also bound",
    ),
    "from flax.training import dynamic_scale as d\nscale = d.DynamicScale()\n": (2, "DynamicScale"),
    "import jmp\nscale = jmp.DynamicLossScale(2.0**15)\n": (2, "jmp.DynamicLossScale"),
    "import tensorflow as tf\nopt = tf.keras.mixed_precision.LossScaleOptimizer(o)\n"
    "grads = opt.get_unscaled_gradients(grads)\nclipped = tf.clip_by_global_norm(grads, 1.0)\n": (3, "gradients that"),
}


@pytest.mark.parametrize("source", REFUSED)
def test_a_use_without_an_equivalent_leaves_the_file_and_tells_what_to_write(source: str) -> None:
    done = migrated(source + "\nimport torch\nwith torch.autocast('cuda'):\n    pass\n")  # which could be converted
    assert (done.outcome, done.after) == ("refused", done.before)
    line, what = REFUSED[source]
    assert [place for place in done.refused if place.line == line and what in place.what and place.write]


LOOK = {
    "import torch\nwith torch.autocast(device):\n    pass\n": "# polyamp: on a CPU torch computes in bfloat16",
    loop("opt_level='O1', loss_scale=args.loss_scale"): '# polyamp: loss_scale is a number, "dynamic" or None',
    "from apex import amp\ndef step(loss, opt):\n    with amp.scale_loss(loss, opt) as s:\n        s.backward()\n": (
        "# polyamp: wrap the optimizer where it is made"
    ),
}


@pytest.mark.parametrize("source", LOOK)
def test_what_needs_a_look_has_a_comment(source: str) -> None:
    done = migrated(source)
    assert done.outcome == "look"
    assert LOOK[source] in done.after.decode()
    assert migrate_source(done.after).outcome == "unchanged"


def test_gradients_that_apex_had_unscaled_are_unscaled_before_they_are_clipped() -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    assert f"opt.unscale_()\n{clip}\n" in after(loop().replace("opt.step()", f"{clip}\nopt.step()"))


@pytest.mark.parametrize(
    "change",
    [
        ("scaler.update()", "save(scaler)\n    scaler.update()"),
        ("scaler.step(opt)", "scaler.step(opt)\n    scaler.step(other)"),
        ("scaler.step(opt)", "scaler.step(opt)\n    opt.step()"),
        ("scaler.update()", "scaler.update(2.0)"),
    ],
)
def test_a_scaler_that_is_not_all_in_sight_becomes_polyamps_scaler(change: tuple[str, str]) -> None:
    source = "import torch\nopt = torch.optim.SGD(p, lr=1)\nscaler = torch.cuda.amp.GradScaler(128.0)\nfor x in data:\n"
    source += "    scaler.scale(f(x)).backward()\n    scaler.step(opt)\n    scaler.update()\n"
    assert "opt.backward(f(x))" in after(source)
    assert "GradScaler" not in after(source)
    kept = after(source.replace(*change))
    assert "scaler = polyamp.backends.torch.GradScaler(init_scale=128.0)" in kept
    assert "scaler.scale(f(x)).backward()" in kept


def test_words_of_trainers_are_named_with_their_page() -> None:
    done = migrated("from lightning.pytorch import Trainer\nTrainer(precision='16-mixed', max_epochs=1)\n")
    assert done.outcome == "unchanged"
    (named,) = done.named
    assert named.line == 2
    assert named.write == "docs/migrate/lightning.md"
    assert (Path(__file__).parents[2] / named.write).exists()


def test_a_file_that_python_cannot_read_is_reported() -> None:
    assert migrated("from apex import amp\nprint 'two'\n").outcome == "unreadable"
    assert migrate_source(b"# coding: latin-9000\nfrom apex import amp\n").outcome == "unreadable"


FILLER = ["", "# a comment  ", "x = [1,2 ,3]", "if x :\n    y=1 ;z = 2", "s = '''\ntorch.autocast\n'''", "print( 'é' )"]


@given(
    filler=st.lists(st.sampled_from(FILLER), min_size=4, max_size=4),
    newline=st.sampled_from(["\n", "\r\n"]),
    indent=st.sampled_from(["  ", "    ", "\t"]),
    ends=st.booleans(),
    bom=st.booleans(),
)
def test_text_around_a_conversion_stays_as_it_is(
    filler: list[str], newline: str, indent: str, ends: bool, bom: bool
) -> None:
    lines = [
        filler[0],
        "import torch",
        filler[1],
        "with torch.autocast('cuda'):",
        f"{indent}pass",
        filler[2],
        filler[3],
    ]
    source = "\n".join(lines).replace("\n", newline) + (newline if ends else "")
    encoded = (b"\xef\xbb\xbf" if bom else b"") + source.encode()
    done = migrate_source(encoded)
    expected = source.replace("torch.autocast('cuda')", 'polyamp.autocast("mixed_float16")')
    assert done.after.decode("utf-8-sig").replace("import polyamp", "import torch", 1) == expected
    assert done.after.startswith(b"\xef\xbb\xbf") == bom
    assert migrate_source(done.after).outcome == "unchanged"


def test_the_standard_library_is_left_byte_identical() -> None:
    found = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    sample = [path.read_bytes() for path in random.Random(0).sample(found, 200)]
    for source in sample:
        done = migrate_source(source)
        assert done.after is done.before is source
        assert not done.refused
    small = [source for source in sample if 500 < len(source) < 6000][:4]
    for source in small:  # also by the parser, which the words of most files never reach
        assert Program(source).module.bytes == source
        assert Program(source).uses(("apex", "torch", "tensorflow", "jmp", "flax")) == []


def test_fused_optimizers_that_pytorch_lacks_come_from_a_module_that_is_imported() -> None:
    source = "import torch\nfrom apex.optimizers import FusedAdam, FusedLAMB\nx = torch\n"
    source += "a = FusedAdam(p, bias_correction=False)\nb = FusedLAMB(p)\nc = FusedAdam(p, lr=1)\n"
    module = "polyamp.backends.torch.compat.apex.optimizers"
    done = after(source)
    assert done.count("import ") == 3
    assert f"\nimport {module}\n" in done
    assert f"\na = {module}.FusedAdam(p, bias_correction=False)\nb = {module}.FusedLAMB(p)\n" in done
    assert done.endswith("\nc = torch.optim.AdamW(p, lr=1, weight_decay=0)\n")
    assert migrate_source(done.encode()).outcome == "unchanged"
