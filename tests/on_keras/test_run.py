"""`polyamp run` of Keras scripts: under a policy they are refused before they train, with the lines to write."""

import keras
import pytest

import polyamp
from polyamp.backends.keras.run import begin
from polyamp.run import Session

pytestmark = pytest.mark.backends


def test_polyamp_run_under_a_policy_refuses_an_optimizer_with_the_lines_to_write() -> None:
    with Session(polyamp.policy("mixed_float16")) as session:
        begin(session)
        with pytest.raises(polyamp.errors.UsageError) as refused:
            keras.optimizers.SGD()
    lines = ("polyamp.convert(model, policy)", "polyamp.wrap_optimizer(optimizer, policy)")
    assert all(line in str(refused.value) for line in lines)
    keras.optimizers.SGD()
