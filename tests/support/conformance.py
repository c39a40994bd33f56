"""The promises of every adapter about steps, casts and saved loss scales."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import polyamp
from polyamp import LossScale, adapters, policy
from polyamp.errors import InvalidTypeError, NonFiniteLossError, StateError, UsageError
from support.harness import overflow_trace, random_arrays, same_bits, spoiled

SETTINGS = {
    "default": LossScale(init=2.0**10, interval=3),
    "hysteresis": LossScale(init=2.0**10, interval=3, hysteresis=2),
    "consecutive": LossScale(init=2.0**10, interval=3, hysteresis=2, consecutive=True),
    "late": LossScale(init=2.0**10, interval=3, late_growth="always"),
    "narrow": LossScale(init=4.0, interval=1, min=1.0, max=16.0, on_min="ignore"),
    "no powers of two": LossScale(init=1000.0, growth=1.7, backoff=0.7, interval=2),
    "fixed": LossScale.fixed(128.0),
}


class Conformance:
    """Tests of a framework; a subclass has a fixture ``harness``."""

    def test_adapter_is_found_by_name_and_by_object(self, harness: Any) -> None:
        adapter = adapters.adapter_named(harness.name)
        assert adapter.name == harness.name
        assert adapters.adapter_of(harness.plain_optimizer()) is adapter

    def test_an_optimizer_keeps_its_policy(self, harness: Any) -> None:
        chosen = policy("mixed_bfloat16", rules={"softmax": "lower"})
        wrapped = polyamp.wrap_optimizer(harness.plain_optimizer(), chosen)
        assert wrapped.policy == chosen
        assert f"policy={chosen}" in repr(wrapped)
        assert polyamp.wrap_optimizer(harness.plain_optimizer(), loss_scale=8.0).policy == policy("float32")
        assert polyamp.wrap_optimizer(harness.plain_optimizer()).policy is None  # nobody chose one

    def test_description_is_json(self, harness: Any) -> None:
        description = adapters.adapter_named(harness.name).describe()
        assert json.loads(json.dumps(description)) == description
        assert description["version"]

    @pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16"])
    def test_step_is_the_plain_update(self, harness: Any, name: str) -> None:
        weights, grads = random_arrays(0), random_arrays(1)
        session = harness.start(weights, policy(name), learning_rate=0.5)
        assert session.step(grads)
        expected = {key: weights[key] - np.float32(0.5) * grads[key] for key in weights}
        for key, array in session.weights().items():
            np.testing.assert_allclose(array, expected[key], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_scaling_by_a_power_of_two_changes_no_bit(self, harness: Any, optimizer: Any) -> None:
        plain = harness.start(random_arrays(0), policy("float32"), optimizer=optimizer)
        scaled = harness.start(random_arrays(0), policy("mixed_float16"), optimizer=optimizer)
        for seed in range(5):
            plain.step(random_arrays(seed))
            scaled.step(random_arrays(seed))
        assert same_bits(plain.weights(), scaled.weights())

    @pytest.mark.parametrize(
        ("optimizer", "name", "steps_before", "value"),
        [("sgd", "O2", 0, np.inf), ("adam", "O2", 2, -np.inf), ("adam", "mixed_float16", 1, np.nan)],
    )
    def test_overflow_changes_nothing(
        self, harness: Any, optimizer: Any, name: str, steps_before: int, value: float
    ) -> None:
        session, spared = (harness.start(random_arrays(0), policy(name), optimizer=optimizer) for _ in range(2))
        for seed in range(steps_before):
            session.step(random_arrays(seed, 1e-2))
            spared.step(random_arrays(seed, 1e-2))
        weights, memory = session.weights(), session.memory()
        result = session.step(spoiled(random_arrays(7, 1e-2), value))
        assert not result
        assert (result.scale, result.skipped_in_a_row) == (2.0**15, 1)
        assert same_bits(session.weights(), weights)
        assert same_bits(session.memory(), memory)
        session.step(random_arrays(8, 1e-2))
        spared.step(random_arrays(8, 1e-2))
        assert same_bits(session.weights(), spared.weights())

    @pytest.mark.parametrize("settings", SETTINGS)
    @pytest.mark.parametrize("seed", range(2))
    def test_scale_follows_the_one_rule(self, harness: Any, settings: str, seed: int) -> None:
        config = SETTINGS[settings].in_float32()
        session = harness.start(random_arrays(0), policy("mixed_float16"), loss_scale=config)
        state, grads = config.initial_state(), random_arrays(1, scale=1e-3)
        for finite in overflow_trace(seed, 40):
            result = session.step(grads if finite else spoiled(grads, np.inf))
            state = polyamp.advance(config, state, finite)
            assert (result.applied, result.scale, result.skipped_in_a_row) == (finite, state.scale, state[3])
        assert polyamp.save_loss_scale(session.holder) == config.to_state_dict(state)

    def test_many_overflows_leave_a_scale_that_can_divide(self, harness: Any) -> None:
        config, grads = LossScale(on_min="ignore"), random_arrays(1)
        session = harness.start(random_arrays(0), policy("mixed_float16"), loss_scale=config, learning_rate=1.0)
        for _ in range(40):
            result = session.step(spoiled(grads, np.inf))
        assert result.scale == config.min == 2.0**-14
        assert session.step(grads)
        for key, array in session.weights().items():
            np.testing.assert_allclose(array, random_arrays(0)[key] - grads[key], rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_a_loss_that_is_not_finite_skips_the_step_with_one_warning(self, harness: Any, value: float) -> None:
        session = harness.start(random_arrays(0), policy("mixed_float16"))
        before = session.weights()
        with pytest.warns(polyamp.PolyampWarning, match="before scaling: a smaller scale cannot help") as said:
            result = session.step(random_arrays(1), loss=value)
        own = [one for one in said if issubclass(one.category, polyamp.PolyampWarning)]
        assert (result.applied, len(own)) == (False, 1)
        assert ("before scaling" in result.reason) is (harness.name != "jax")  # whose state does not have the loss
        assert not session.step(random_arrays(1), loss=value)
        assert "before scaling" not in session.step(spoiled(random_arrays(1), value), loss=1.0).reason
        assert same_bits(session.weights(), before)
        assert session.step(random_arrays(1))

    def test_a_loss_that_is_not_finite_raises_where_that_is_asked_for(self, harness: Any) -> None:
        strict = LossScale(nonfinite_loss="raise")
        session = harness.start(random_arrays(0), policy("mixed_float16"), loss_scale=strict)
        with pytest.raises(NonFiniteLossError, match="a smaller scale cannot help"):
            session.step(random_arrays(1), loss=np.nan)
        assert same_bits(session.weights(), harness.start(random_arrays(0), policy("mixed_float16")).weights())

    @pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")  # Keras says so
    def test_a_parameter_without_a_gradient_stays_as_it_is(self, harness: Any) -> None:
        session, grads = harness.start(random_arrays(0), policy("mixed_float16")), random_arrays(1)
        del grads["vector"]
        before = session.weights()
        assert session.step(grads)
        unchanged = [name for name, array in session.weights().items() if np.array_equal(array, before[name])]
        assert unchanged == ["vector"]

    def test_clipping_limits_the_unscaled_norm(self, harness: Any) -> None:
        weights, grads = random_arrays(0), random_arrays(1)
        norm = np.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in grads.values()))
        session = harness.start(weights, policy("mixed_float16"), learning_rate=1.0, max_grad_norm=norm / 4)
        session.step(grads)
        for key, array in session.weights().items():
            np.testing.assert_allclose(array, weights[key] - grads[key] / 4, rtol=1e-5, atol=1e-6)

    def test_clipping_leaves_small_gradients_alone(self, harness: Any) -> None:
        clipped = harness.start(random_arrays(0), policy("mixed_float16"), max_grad_norm=1e6)
        free = harness.start(random_arrays(0), policy("mixed_float16"))
        clipped.step(random_arrays(1))
        free.step(random_arrays(1))
        assert same_bits(clipped.weights(), free.weights())

    def test_master_weights_keep_updates_that_16_bits_would_lose(self, harness: Any) -> None:
        weights = {key: np.ones_like(array) for key, array in random_arrays(0).items()}
        grads = {key: np.full_like(array, 2.0**-13) for key, array in weights.items()}  # half of it rounds to 1.0
        session = harness.start(weights, policy("O2"), learning_rate=1.0)
        for _ in range(64):
            session.step(grads)
        for array in session.weights().values():
            assert array.dtype == np.float16
            np.testing.assert_array_equal(array, np.full_like(array, 1 - 64 * 2.0**-13))

    def test_master_weights_take_over_what_was_assigned_to_the_model(self, harness: Any) -> None:
        small = {"w": np.full(2, 2.0**-13, np.float32)}
        session = harness.start({"w": np.ones(2, np.float32)}, policy("O2"), learning_rate=1.0)
        session.step(small)
        session.assign({"w": np.float32([1.0, 5.0])})  # the first is unchanged, and its master has more than 16 bits
        for _ in range(7):
            session.step(small)
        assert session.weights()["w"].tolist() == [1.0 - 2.0**-10, 5.0]

    def test_gradients_below_float16_survive_the_scale(self, harness: Any) -> None:
        weights = {key: np.zeros_like(array) for key, array in random_arrays(0).items()}
        grads = {key: np.full_like(array, 2.0**-30) for key, array in weights.items()}
        session = harness.start(weights, policy("O2"), learning_rate=2.0**20)
        session.step(grads)
        for array in session.weights().values():
            np.testing.assert_array_equal(array, np.full_like(array, -(2.0**-10)))

    @pytest.mark.parametrize("fault", ["kind", "field", "range", "type"])
    def test_bad_state_is_refused_and_changes_nothing(self, harness: Any, fault: str) -> None:
        session = harness.start(random_arrays(0), policy("mixed_float16"))
        before = polyamp.save_loss_scale(session.holder)
        bad: dict[str, Any] = dict(before)
        if fault == "field":
            del bad["scale"]
        else:
            field, value = {"kind": ("kind", "other"), "range": ("scale", 0.0), "type": ("skipped", "three")}[fault]
            bad[field] = value
        with pytest.raises(StateError):
            session.load_loss_scale(bad)
        assert polyamp.save_loss_scale(session.holder) == before

    def test_wrapping_twice_is_refused(self, harness: Any) -> None:
        adapter = adapters.adapter_named(harness.name)
        wrapped = polyamp.wrap_optimizer(harness.plain_optimizer(), "mixed_float16")
        assert adapters.adapter_of(wrapped) is adapter
        with pytest.raises(UsageError):
            polyamp.wrap_optimizer(wrapped, "mixed_float16")

    def test_what_is_not_an_optimizer_is_refused(self, harness: Any) -> None:
        with pytest.raises(InvalidTypeError):
            polyamp.wrap_optimizer(object(), "mixed_float16", backend=harness.name)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
    def test_casting_rounds_as_ieee_and_touches_floats_only(self, harness: Any, dtype: Any) -> None:
        rng = np.random.default_rng(0)
        drawn = rng.standard_normal(4096) * 2.0 ** rng.integers(-30, 20, 4096)
        floats = np.array([*drawn, 6e-8, 2.9e-8, 65519.0, 70000.0, -0.0, np.nan, np.inf], np.float32)
        others = {"i": np.arange(3, dtype=np.int32), "b": np.array([True, False])}
        cast = policy(compute=np.dtype(dtype).name).cast_to_compute(harness.tree({"f": floats, **others}))
        found = harness.arrays(cast)
        with np.errstate(over="ignore"):
            expected = floats.astype(dtype)
        assert found["f"].dtype == dtype
        np.testing.assert_array_equal(found.pop("f").astype(np.float32), expected.astype(np.float32))
        assert same_bits(found, others)

    def test_without_scaling_nothing_is_checked(self, harness: Any) -> None:
        session = harness.start(random_arrays(0), policy("float32"))
        assert session.step(spoiled(random_arrays(1), np.nan)).applied
        assert np.isnan(session.weights()["matrix"][-1, -1])
