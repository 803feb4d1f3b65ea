"""The compiled linear engine: the golden model's bits, the cycle model's cycles."""

import numpy as np
import pytest

from kvant import config
from kvant.hw.linear.cycles import linear_cycles
from kvant.hw.numeric.codes import INT8
from kvant.linear import golden_outputs, random_case
from kvant.sim.compiled.linear import CompiledLinear

SHAPES = [  # tokens, inputs, outputs; 8 accumulators and 40 activation groups: several jobs from 9 tokens on
    (1, 16, 4),
    (1, 1, 1),
    (1, 100, 37),
    (3, 33, 5),
    (7, 48, 33),
    (20, 50, 9),
]


@pytest.fixture(scope="module")
def chosen():
    """A small array: 4 x 4 lanes, groups of 16."""
    return config.load(None, ["rows=4", "cols=4", "group=16", "accumulators=8", "activation_words=160"])


@pytest.fixture(scope="module")
def engine(chosen):
    engine = CompiledLinear(chosen.linear)
    yield engine
    engine.close()


def bits(y: np.ndarray) -> list:
    return y.view(np.uint32).tolist()


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
def test_bits_of_the_golden_model_in_the_cycles_of_the_model(chosen, engine, tokens, inputs, outputs):
    p = chosen.linear
    arrays = random_case(chosen, tokens=tokens, inputs=inputs, outputs=outputs, seed=inputs)
    product = engine.multiply(arrays["x"], engine.pack(arrays))
    assert bits(product.y) == bits(golden_outputs(p, arrays)["y"])
    marked = arrays["w_coeff"] == INT8
    expected = linear_cycles(p, tokens=tokens, inputs=inputs, outputs=outputs, int8_groups=marked)
    assert product.cycles == expected.total


@pytest.mark.parametrize("stall", [0.3, 0.9])
def test_pauses_change_no_bit(chosen, stall):
    engine = CompiledLinear(chosen.linear, stall=stall, seed=5)
    for tokens, inputs, outputs in SHAPES:
        arrays = random_case(chosen, tokens=tokens, inputs=inputs, outputs=outputs, seed=inputs)
        product = engine.multiply(arrays["x"], engine.pack(arrays))
        assert bits(product.y) == bits(golden_outputs(chosen.linear, arrays)["y"])
    assert engine.status()["error"] == 0
    engine.close()


def test_work_is_counted_and_nothing_is_left_over(chosen):
    engine = CompiledLinear(chosen.linear)
    arrays = random_case(chosen, tokens=2, inputs=40, outputs=10, seed=0)
    weights = engine.pack(arrays)
    busy = 0
    for _ in range(3):
        engine.multiply(arrays["x"], weights)
        marked = arrays["w_coeff"] == INT8
        busy += linear_cycles(chosen.linear, tokens=2, inputs=40, outputs=10, int8_groups=marked).busy
    assert engine.status() == {"nonfinite": 0, "error": 0, "busy_cycles": busy}
    engine.close()


def test_activations_that_are_not_finite_raise_the_flag(chosen, engine):
    arrays = random_case(chosen, tokens=1, inputs=20, outputs=4, seed=0)
    arrays["x"][0, 3] = np.inf
    product = engine.multiply(arrays["x"], engine.pack(arrays))
    assert bits(product.y) == bits(golden_outputs(chosen.linear, arrays)["y"])
    assert engine.status()["nonfinite"] == 1


def test_the_order_of_the_weights_follows_the_tiles_that_take_turns(chosen, engine):
    arrays = random_case(chosen, tokens=1, inputs=40, outputs=30, seed=1)
    weights = engine.pack(arrays)
    again = weights.ordered(weights.interleave)
    assert again["data"] is weights.data
    other = weights.ordered(3)
    assert sorted(map(bytes, other["data"])) == sorted(map(bytes, weights.data))
    assert not np.array_equal(other["data"], weights.data)


def test_several_models_live_side_by_side_and_end_in_any_order(chosen):
    arrays = random_case(chosen, tokens=1, inputs=20, outputs=6, seed=2)
    expected = bits(golden_outputs(chosen.linear, arrays)["y"])
    engines = [CompiledLinear(chosen.linear) for _ in range(3)]
    for first in (1, 0, 0):
        for engine in engines:
            assert bits(engine.multiply(arrays["x"], engine.pack(arrays)).y) == expected
        engines.pop(first).close()
