"""All of PyTorch's operators and modules: they compute what they did, in whatever format, or an error explains it."""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import polyamp
from polyamp.errors import FormatError, UsageError
from support.torch_changes import ANY_NUMBERS, PLACES, calls_of, compared, judged, outcome, program

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # PyTorch's own warnings
both = pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])

# --- operators in regions ---------------------------------------------------------------------------------------------

EXCEPT = {  # with reasons
    "to_sparse": "sparse tensors are not compared",
    "normal_": "random numbers of a format",
    "logcumsumexp": "native autocast leaves it in 16 bits: of results near 20,000 the gradient is rounded away",
    "polygamma": "its derivative leaves float16",
    "polygamma_": "its derivative leaves float16",
    "special_erfcx out=": "the results for integers leave float16",
    "addr_": "the backward pass, outside of the region, has no kernel for a float32 vector and a 16-bit one",
    "special_i1": "the backward pass has no kernel in 16 bits",
    "special_i1e": "the backward pass has no kernel in 16 bits",
    "_safe_softmax.default": "its backward pass has no kernel in float16 on a CPU",
}


@both
@pytest.mark.parametrize("count", [150, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_operators_in_a_region_compute_what_they_did_or_are_explained(
    dtype: torch.dtype, count: int | None, policy: str
) -> None:
    draw, wrong, right = random.Random(0), {}, 0
    infos = [info for info in op_db if info.name not in ANY_NUMBERS]
    draw.shuffle(infos)
    calls = (call for info in infos for call in calls_of(info, dtype))
    for call in itertools.islice(calls, count):
        fn, args = program(call, draw.choice([*PLACES]))
        was = judged(fn, args, polyamp.autocast(policy), FormatError, same_formats=False)
        right += was == "right"
        if was not in ("right", "refused", "untaken") and str(call) not in EXCEPT:
            wrong[str(call)] = was
    assert wrong == {}
    assert right > 0.8 * (count or 600)


# --- modules, in regions and rewritten --------------------------------------------------------------------------------

NOT_REWRITTEN = {  # with reasons
    "GaussianNLLLoss": "it looks at the numbers of the variance",
    "CTCLoss": "the shapes of its results depend on numbers",
    "BatchNorm": "without momentum it reads a number",
    "Lazy": "it has no shapes yet",
}
NOT_IN_REGIONS = {"LSTM": "oneDNN has no kernel for it in float16"}
NEAR_ZERO = {"TransformerEncoder": "in bfloat16 one unit of a ReLU that is near 0 changes its side"}


def samples(one_in: int) -> Iterator[tuple[nn.Module, Any]]:
    """Yield modules with arguments: of some of PyTorch's modules the first two, in training and in evaluation mode."""
    for info, training in itertools.product(module_db[::one_in], (True, False)):
        torch.manual_seed(0)
        for made in itertools.islice(info.module_inputs_func(info, "cpu", torch.float32, True, training), 2):
            module = info.module_cls(*made.constructor_input.args, **made.constructor_input.kwargs)
            yield module.train(training), made.forward_input


def rewritten(module: nn.Module, policy: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: polyamp.rewrite(module, *args, policy=policy, **kwargs)(*args, **kwargs)


def in_a_region(module: nn.Module, policy: str) -> Callable[..., Any]:
    return polyamp.autocast(policy)(module)


@both
@pytest.mark.parametrize("one_in", [30, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("ahead", "refused"), [(rewritten, NOT_REWRITTEN), (in_a_region, NOT_IN_REGIONS)])
def test_modules_compute_what_they_did(ahead: Any, refused: dict[str, str], one_in: int, policy: str) -> None:
    wrong, right = {}, 0
    for module, given in samples(one_in):
        twin, name = copy.deepcopy(module), type(module).__name__
        try:
            expected = outcome(twin, given.args, given.kwargs, [*twin.parameters()])
        except RuntimeError:
            continue  # torch has no kernel for this mode
        try:
            found = outcome(ahead(module, policy), given.args, given.kwargs, [*module.parameters()])
        except (UsageError, FormatError) as error:
            was = "expected" if name.startswith(tuple(refused)) else str(error)
        else:
            was = compared(found, expected, same_formats=ahead is rewritten)
        right += was == "right"
        if was not in ("right", "expected") and not (was == "a wrong gradient" and name in NEAR_ZERO):
            wrong[name] = was
    assert wrong == {}
    assert right > 200 / one_in
