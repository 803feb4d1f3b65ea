"""The block `variance` with a user's groups: known answers on the simulators, shapes, refusals."""

from pathlib import Path

import numpy as np
import pytest

from kvant.errors import ComparisonError, InputError
from kvant.hw.kvcache.variance import VarianceBlock
from kvant.sim.kvcache import variance
from kvant.variance import BLOCK, golden_fields

# A component that only tells its latency is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

KNOWN_ANSWER = Path(__file__).parents[2] / "known_answers" / "variance.npz"

NUMBERS = {"cycles", "busy_cycles", "group", "rows", "cols", "lanes", "nonfinite", "error"}


@pytest.fixture(scope="module")
def answer():
    with np.load(KNOWN_ANSWER) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.mark.parametrize("stall", [0.0, 0.3])
@pytest.mark.parametrize("simulator", ["verilator", "icarus"])
def test_known_answers(answer, simulator, stall):
    result = BLOCK.simulate({"q": answer["in_q"]}, simulator=simulator, stall=stall, seed=5)
    for name in variance.OUTPUTS:
        assert result[name].dtype == np.int64
        np.testing.assert_array_equal(result[name], answer[f"out_{name}"], err_msg=name)
    groups, n = answer["in_q"].shape
    transfers = groups * -(-n // 8)
    if not stall:
        assert result["cycles"] == transfers + VarianceBlock(8, n).latency
    assert set(result) == {*variance.OUTPUTS, *NUMBERS}
    assert all(result[name].dtype == np.int64 and result[name].shape == () for name in NUMBERS)
    numbers = {"group": n, "rows": 1, "cols": 8, "lanes": 8, "busy_cycles": transfers, "nonfinite": 0, "error": 0}
    assert {name: int(result[name]) for name in numbers} == numbers


@pytest.mark.parametrize("n", [1, 3, 7, 100, 1000])
@pytest.mark.parametrize("lanes", [1, 6, 16])
def test_any_length_with_any_lanes(n, lanes):
    rng = np.random.default_rng(n)
    q = rng.integers(-128, 128, (3, n)).astype(np.int8)
    q[0] = -128
    result = BLOCK.simulate({"q": q}, overrides=[f"lanes={lanes}", "adder=kogge_stone"], simulator="amaranth")
    golden = golden_fields(q)
    assert {name: result[name].tolist() for name in variance.OUTPUTS} == {n_: golden[n_] for n_ in variance.OUTPUTS}
    assert result["cycles"] == 3 * -(-n // lanes) + VarianceBlock(lanes, n).latency


def test_a_result_that_differs_fails_the_comparison(answer, monkeypatch):
    collect = variance.collect

    def wrong(trace, *, group):
        result = collect(trace, group=group)
        result["nvar"][2] += 1
        return result

    monkeypatch.setattr(variance, "collect", wrong)
    with pytest.raises(ComparisonError, match=r"^nvar\[2\] = "):
        BLOCK.simulate({"q": answer["in_q"]}, simulator="amaranth")
    BLOCK.simulate({"q": answer["in_q"]}, simulator="amaranth", check=False)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "array q: missing; legal is int8 [B, n]"),
        ({"q": np.zeros((2, 4), np.int16)}, "array q: dtype int16; legal is int8 [B, n]"),
        ({"q": np.zeros((2, 4), np.uint8)}, "array q: dtype uint8; legal is int8 [B, n]"),
        ({"q": np.zeros(4, np.int8)}, "array q: shape (4,); legal is int8 [B, n]"),
        ({"q": np.zeros((2, 0), np.int8)}, "array q: shape (2, 0); legal is int8 [B, n], no length of zero"),
        ({"q": np.zeros((0, 3), np.int8)}, "array q: shape (0, 3); legal is int8 [B, n], no length of zero"),
        ({"q": np.zeros((1, 65537), np.int8)}, "array q: 65537 elements per group; legal is 1 to 65536"),
        ({"q": np.zeros((1, 4), np.int8), "x": np.zeros(1)}, "array x: unknown; legal are q, group"),
        ({"q": np.zeros((1, 4), np.int8), "group": np.array(64)}, "array group = 64: legal is 4, the length of the"),
    ],
)
def test_case_28_what_is_no_group_is_refused(arrays, words):
    with pytest.raises(InputError) as raised:
        BLOCK.simulate(arrays)
    assert str(raised.value).startswith(words)


def test_the_command_gives_the_arrays(kvant, tmp_path, answer):
    np.savez(tmp_path / "in.npz", q=answer["in_q"])
    where = ("--data", tmp_path / "in.npz", "--out", tmp_path / "out.npz", "--simulator", "amaranth")
    result = kvant("simulate", "variance", *where, "--set", "lanes=5")
    assert result.returncode == 0, result.stderr
    assert "equal to the golden model, bit for bit" in result.stderr
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["nvar"], answer["out_nvar"])
        assert archive["lanes"] == 5
