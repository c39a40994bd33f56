"""Random training programs of one or two wrapped optimizers, next to a model in float64 NumPy, which scales nothing.

Each step ends with the parameters of the model, or skips where the model skips, with every bit as before. The scale
moves as `polyamp.advance` moves it. In an ensemble every member has a model of its own.
"""

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import polyamp
from polyamp import LossScale
from polyamp.backends.jax import apply_gradients, apply_updates, select
from support.jax_cases import bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:autocast to .* changed nothing"),
    pytest.mark.filterwarnings("ignore:the loss was not finite"),
    pytest.mark.filterwarnings("ignore:.*its minimum"),
]

INNER: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.5),
    "adam": lambda: optax.adam(RATE),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(RATE), 2),
}
RATE = 0.125
SCALES = [
    LossScale(init=2.0**4, interval=2, min=2.0**2, max=2.0**6),
    LossScale(init=2.0**4, interval=1, hysteresis=2, max=2.0**6),
    LossScale.fixed(2.0**2),
    LossScale.none(),
]
POLICIES = {"float32": "mixed_float16", "float16": "float16", "bfloat16": "bfloat16"}  # by the dtype of "own"
START = {"wide": np.array([1.0, -0.0]), "own": np.array([1.0, -2.0, 0.5])}
TINY = 2.0**-9  # 16 bits lose it next to 1, so that master weights matter
HUGE = 3e38  # overflows once it is scaled

Tree = dict[str, Any]


class Setting(NamedTuple):
    """What one program is compiled for."""

    inner: str
    own: str = "float32"
    how: str = "apply_gradients"  # or "update", or "uncompiled", which is an update too
    scaled_by: str = "value_and_grad"
    scale: int = 0  # a place in `SCALES`
    limit: float | None = None  # of the gradients' norm
    count: int = 1  # of micro-batches, whose gradients are added
    members: int = 0  # of an ensemble; 0 is none
    optimizers: int = 1

    def wrapped(self) -> Any:
        options = {"loss_scale": SCALES[self.scale], "max_grad_norm": self.limit}
        return polyamp.wrap_optimizer(INNER[self.inner](), POLICIES[self.own], **options)


SETTINGS = [
    Setting("sgd", "float32", "uncompiled", optimizers=2),
    Setting("sgd", "float16", "update", limit=1.0, optimizers=2),
    Setting("sgd", "bfloat16", scale=1, count=2, members=2),
    Setting("momentum", "bfloat16", "uncompiled", "scale_loss", scale=1, limit=1.0),
    Setting("momentum", "float32", "update", "scale_loss", scale=3, count=2),
    Setting("adam", "float16", scaled_by="scale_loss", optimizers=2),
    Setting("adam", "float32", "update", scale=1, members=2, limit=1.0),
    Setting("adam", "bfloat16", "uncompiled", "scale_loss", scale=2, count=2),
    Setting("MultiSteps", "float16", "update", members=2),
    Setting("MultiSteps", "float32", scaled_by="scale_loss", count=2),
]


def loss_fn(params: Tree, x: Tree) -> Any:
    return sum((params[name].astype(jnp.float32) * x[name]).sum() for name in params)


def both(one: Tree, other: Tree, x: Tree) -> Any:
    return loss_fn(one, x) + loss_fn(other, x)


@functools.cache
def compiled(setting: Setting) -> Callable[..., Any]:
    """Return ``step(params, state, micro_batches, applied) -> (params, state, applied)`` of one optimizer."""
    tx = setting.wrapped()

    def gradients(params: Tree, state: Any, x: Tree) -> Tree:
        if setting.scaled_by == "scale_loss":
            return jax.grad(lambda params: polyamp.scale_loss(loss_fn(params, x), state))(params)
        return polyamp.value_and_grad(loss_fn, POLICIES[setting.own])(state, params, x)[1]

    def step(params: Tree, state: Any, x: Tree, applied: Any) -> Any:
        each = [gradients(params, state, jax.tree.map(lambda leaf, at=at: leaf[at], x)) for at in range(setting.count)]
        total = jax.tree.map(lambda *leaves: sum(leaves), *each)
        params, state = moved(setting, tx, total, state, params)
        return params, state, select(state.last_step.applied, applied + 1, applied)

    return ready(setting, step)


@functools.cache
def compiled_jointly(setting: Setting) -> Callable[..., Any]:
    """Return a step of two optimizers on the gradients of one loss, which the first one's state scales."""
    tx = setting.wrapped()

    def step(params: Any, states: Any, x: Tree) -> Any:
        differentiated = polyamp.value_and_grad(both, POLICIES[setting.own], argnums=(0, 1))
        grads = differentiated(states[0], *params, x)[1]
        return [moved(setting, tx, *each) for each in zip(grads, states, params, strict=True)]

    return ready(setting, step)


def ready(setting: Setting, step: Callable[..., Any]) -> Callable[..., Any]:
    mapped = jax.vmap(step) if setting.members else step
    return mapped if setting.how == "uncompiled" else jax.jit(mapped)


def moved(setting: Setting, tx: Any, grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    if setting.how == "apply_gradients":
        return apply_gradients(tx, grads, state, params)
    updates, state = tx.update(grads, state, params)
    return apply_updates(params, updates) if setting.how == "update" else optax.apply_updates(params, updates), state


class Model:
    """One member: parameters in float64, the memory of the plain optimizer, and the state of the loss scale."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.config = setting, SCALES[setting.scale]
        self.dtypes = {"wide": np.dtype("float32"), "own": jnp.dtype(setting.own)}
        self.full, self.applied, self.scale = dict(START), 0, self.config.initial_state()
        self.params = self._rounded()
        self.memory = {name: np.zeros((2, *value.shape)) for name, value in START.items()}

    def _rounded(self) -> Tree:
        return {name: self.full[name].astype(np.float32).astype(dtype) for name, dtype in self.dtypes.items()}

    def _update(self, name: str, grad: Any) -> Any:
        """Return what optax adds to a parameter."""
        memory, inner = self.memory[name], self.setting.inner
        if inner == "adam":
            memory[:] = 0.9 * memory[0] + 0.1 * grad, 0.999 * memory[1] + 0.001 * grad**2
            first, second = memory[0] / (1 - 0.9**self.applied), memory[1] / (1 - 0.999**self.applied)
            return -RATE * first / (np.sqrt(second) + 1e-8)
        if inner == "momentum":
            memory[0] = grad + 0.5 * memory[0]
            return -RATE * memory[0]
        if inner == "MultiSteps":
            memory[self.applied % 2] = grad
            return 0.0 if self.applied % 2 else -RATE * memory.mean(0)
        return -RATE * grad

    def step(self, batches: Tree, made_at: float | None = None) -> None:
        """Take a step on the sum of gradients, which were made at a loss scale: by default the own one."""
        own, at = np.float32(self.scale.scale), np.float32(self.scale.scale if made_at is None else made_at)
        scaled = [(np.float32(batches[name]) * at).astype(self.dtypes[name]) for name in START]
        sums = [functools.reduce(np.add, each) for each in scaled]
        sums = [one if own == at else np.float32(one) * (own / at) for one in sums]
        finite = all(np.isfinite(np.float32(one)).all() for one in (*sums, *scaled))
        if finite or not self.config.check:
            grads = {name: batches[name].astype(np.float64).sum(0) for name in START}
            if self.setting.limit is not None:
                norm = np.sqrt(sum(np.square(grad).sum() for grad in grads.values()))
                grads = {name: grad * min(1.0, self.setting.limit / max(norm, 1e-30)) for name, grad in grads.items()}
            self.applied += 1
            for name, rounded in self._rounded().items():  # the user may have written a parameter
                full = np.where(rounded == self.params[name], self.full[name], self.params[name].astype(np.float64))
                self.full[name] = full + self._update(name, grads[name])
            self.params = self._rounded()
        self.scale = polyamp.advance(self.config, self.scale, finite if self.config.check else True)


class Side:
    """One wrapped optimizer, its parameters and its state; and a model of each member."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.tx = setting, setting.wrapped()
        self.models = [Model(setting) for _ in range(setting.members or 1)]
        self.params = self.joined([model.params for model in self.models])
        self.state = (jax.vmap(self.tx.init) if setting.members else self.tx.init)(self.params)
        self.applied = self.joined([jnp.int32(0) for _ in self.models])

    def joined(self, trees: Any) -> Any:
        trees = [jax.tree.map(jnp.asarray, tree) for tree in trees]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) if self.setting.members else trees[0]

    def kept(self) -> Any:
        """Return what a skipped step leaves as it is, for each member."""
        held = self.params, self.state.inner_state, self.state.master_weights
        return [
            bits(jax.tree.map(lambda leaf, at=at: leaf[at], held) if self.setting.members else held)
            for at in range(len(self.models))
        ]

    def check(self, before: Any, applied: list[int]) -> None:
        """Compare the parts after a step with the models, and with what they were before it."""
        now = self.kept()
        for at, model in enumerate(self.models):
            if model.applied == applied[at]:
                assert now[at] == before[at], "a skipped step changed something"
        self.check_scale()
        assert np.ravel(self.applied).tolist() == [model.applied for model in self.models]
        for name, dtype in self.models[0].dtypes.items():
            full = self.joined([model.full[name] for model in self.models])
            assert self.params[name].dtype == dtype
            masters = self.state.master_weights or {}
            # float32 rounds the 1 - 0.999**t of adam
            near = {"rtol": 1e-4 if dtype == np.float32 else 2.0**-7, "atol": 3e-5}
            wanted = self.joined([model.params[name] for model in self.models])
            np.testing.assert_allclose(np.float32(self.params[name]), np.float32(wanted), **near)
            if masters.get(name) is not None and all(m.applied > b for m, b in zip(self.models, applied, strict=True)):
                np.testing.assert_allclose(masters[name], np.float32(full), rtol=1e-4, atol=3e-5)
                np.testing.assert_array_equal(masters[name].astype(dtype), self.params[name])

    def check_scale(self) -> None:
        found = [np.ravel(field).tolist() for field in self.state.scalars]
        assert found == [list(values) for values in zip(*(model.scale for model in self.models), strict=True)]


WHICH = st.integers(0, 1)
VALUES = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, -3.0, TINY]), min_size=5, max_size=5)
BAD = st.tuples(st.sampled_from([np.inf, -np.inf, np.nan, HUGE, -HUGE]), st.integers(0, 29))


class Steps(RuleBasedStateMachine):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting, self.sides = setting, [Side(setting) for _ in range(setting.optimizers)]
        self.early: list[tuple[Tree, Tree, float]] = []  # gradients, the data and the scale that they were made with

    def _side(self, which: int) -> Side:
        return self.sides[which % len(self.sides)]

    def _batches(self, values: list[float], bad: tuple[float, int] | None = None, count: int = 1) -> list[Tree]:
        """Return micro-batches for each member; one element of one of them may be bad."""
        flat = np.tile(np.array(values, np.float32), (self.setting.members or 1, count, 1))
        if bad is not None and SCALES[self.setting.scale].check:
            flat.reshape(-1)[bad[1] % flat.size] = bad[0]
        return [{"wide": each[:, :2], "own": each[:, 2:]} for each in flat]

    def _end(self, sides: list[Side], before: list[Any], batches: list[Tree], made_at: list[float] | None) -> None:
        applied = [[model.applied for model in side.models] for side in sides]
        with np.errstate(over="ignore", invalid="ignore"):
            for side in sides:
                for place, (model, batch) in enumerate(zip(side.models, batches, strict=True)):
                    model.step(batch, made_at and made_at[place])
        for side, own, counts in zip(sides, before, applied, strict=True):
            side.check(own, counts)

    @rule(which=WHICH, values=VALUES, bad=st.one_of(st.none(), BAD))
    def step(self, which: int, values: list[float], bad: tuple[float, int] | None) -> None:
        side, batches = self._side(which), self._batches(values, bad, self.setting.count)
        before = side.kept()
        stepped = compiled(self.setting)(side.params, side.state, side.joined(batches), side.applied)
        side.params, side.state, side.applied = stepped
        self._end([side], [before], batches, None)

    step_more_often = step

    @precondition(lambda self: self.setting.optimizers == 2)
    @rule(values=VALUES, bad=st.one_of(st.none(), BAD))
    def step_jointly(self, values: list[float], bad: tuple[float, int] | None) -> None:
        """The first state scales the loss, and the second optimizer divides by that scale, not by its own."""
        batches, before = self._batches(values, bad), [side.kept() for side in self.sides]
        made_at = [model.scale.scale for model in self.sides[0].models]
        params, states = ([getattr(side, name) for side in self.sides] for name in ("params", "state"))
        x = jax.tree.map(lambda leaf: leaf[0], batches[0])
        for side, (side.params, side.state) in zip(
            self.sides, compiled_jointly(self.setting)(params, states, x), strict=True
        ):
            side.applied = select(side.state.last_step.applied, side.applied + 1, side.applied)
        self._end(self.sides, before, batches, made_at)

    @precondition(lambda self: not self.setting.members)
    @rule(which=WHICH, values=VALUES)
    def differentiate_early(self, which: int, values: list[float]) -> None:
        side, batches = self._side(which), self._batches(values)
        x = jax.tree.map(lambda leaf: leaf[0], batches[0])
        _, grads = polyamp.value_and_grad(loss_fn, POLICIES[self.setting.own])(side.state, side.params, x)
        self.early.append((grads, batches[0], side.models[0].scale.scale))

    @precondition(lambda self: self.early)
    @rule(which=WHICH)
    def use_early_gradients(self, which: int) -> None:
        """After other steps of this optimizer or of another one: the scales may differ by now."""
        (grads, batch, made_at), side = self.early.pop(0), self._side(which)
        before = side.kept()
        side.params, side.state = moved(self.setting, side.tx, grads, side.state, side.params)
        side.applied = select(side.state.last_step.applied, side.applied + 1, side.applied)
        self._end([side], [before], [batch], [made_at])

    @rule(which=WHICH, value=st.sampled_from(["half", 0.5, -0.0]))
    def write_parameters(self, which: int, value: Any) -> None:
        """Master weights follow at the next step that is applied."""
        side = self._side(which)
        side.params = jax.tree.map(lambda p: p * 0.5 if value == "half" else jnp.full_like(p, value), side.params)
        for model in side.models:
            model.params = {
                name: own * own.dtype.type(0.5) if value == "half" else np.full_like(own, value)
                for name, own in model.params.items()
            }

    @rule(which=WHICH, by=st.sampled_from(["pickle", "flax", "wrapped again"]))
    def save_and_restore(self, which: int, by: str) -> None:
        side, before = self._side(which), self._side(which).kept()
        if by == "wrapped again":
            side.tx = self.setting.wrapped()
        like = jax.vmap(side.tx.init) if self.setting.members else side.tx.init
        if by == "pickle":
            side.state = pickle.loads(pickle.dumps(jax.device_get(side.state)))
        elif by == "flax":
            side.state = serialization.from_bytes(like(side.params), serialization.to_bytes(side.state))
        assert jax.tree.structure(side.state) == jax.tree.structure(like(side.params))
        assert side.kept() == before
        side.check_scale()

    @precondition(lambda self: not self.setting.members)
    @rule(which=WHICH)
    def load_the_loss_scale(self, which: int) -> None:
        side = self._side(which)
        saved, kept = polyamp.save_loss_scale(side.state), side.state._asdict()
        new = side.tx.init(side.params)._replace(**{name: kept[name] for name in ("inner_state", "master_weights")})
        side.state = polyamp.load_loss_scale(new, saved)
        side.check_scale()

    @precondition(lambda self: self.setting.scale < 2)  # the others are fixed
    @rule(which=WHICH, scale=st.sampled_from([4.0, 32.0]))
    def set_the_scale(self, which: int, scale: float) -> None:
        side = self._side(which)
        side.state = side.state._replace(loss_scale=jnp.full_like(side.state.loss_scale, scale))
        for model in side.models:
            model.scale = model.scale._replace(scale=scale)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.inner}-{one.own}-{one.how}")
def test_programs(setting: Setting) -> None:
    bounds = settings(max_examples=4, stateful_step_count=25, derandomize=True)
    run_state_machine_as_test(functools.partial(Steps, setting), settings=bounds)  # type: ignore[no-untyped-call]


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.inner}-{one.own}-{one.how}")
def test_a_hundred_programs(setting: Setting) -> None:
    bounds = settings(max_examples=100, stateful_step_count=40)
    run_state_machine_as_test(functools.partial(Steps, setting), settings=bounds)  # type: ignore[no-untyped-call]
