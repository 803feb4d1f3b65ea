"""`kvant diff`: bit-exact comparison of archives."""

import sys

import numpy as np
import pytest

from kvant.cli import main
from kvant.sim.streams import Trace
from kvant.sim.words import trace_arrays


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Compare two sets of arrays on the command line: exit code, text."""

    def run_diff(a, b, *options):
        np.savez(tmp_path / "a.npz", **a)
        np.savez(tmp_path / "b.npz", **b)
        arguments = ["kvant", "diff", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, (captured.out + captured.err).strip()

    return run_diff


def test_equal_archives_exit_with_0(run):
    arrays = {"y": np.arange(6, dtype=np.float32).reshape(2, 3), "cycles": np.array(7), "format": np.array("mant")}
    assert run(arrays, arrays) == (0, "equal: 3 arrays")


def test_first_difference_names_array_index_and_both_values(run):
    a = {"x": np.zeros(2, np.int8), "y": np.zeros((2, 3), np.float32)}
    b = {name: array.copy() for name, array in a.items()}
    b["y"][1, 0] = 1.5
    b["y"][1, 2] = -1
    assert run(a, b) == (1, "y[1, 0]: A 0.0 (0x00000000), B 1.5 (0x3fc00000) (2 of 6 values differ)")


def test_order_of_the_first_archive_decides_which_difference_is_first(run):
    a = {"z": np.array(1), "a": np.array(1)}
    assert run(a, {"a": np.array(2), "z": np.array(2)}) == (1, "z: A 1, B 2 (1 of 1 values differ)")


def test_negative_zero_differs_from_zero(run):
    code, text = run({"y": np.array([0.0], np.float16)}, {"y": np.array([-0.0], np.float16)})
    assert (code, text) == (1, "y[0]: A 0.0 (0x0000), B -0.0 (0x8000) (1 of 1 values differ)")


def test_nans_of_equal_bits_are_equal_and_of_other_bits_are_not(run):
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert run({"y": quiet}, {"y": quiet})[0] == 0
    assert run({"y": quiet}, {"y": other}) == (
        1,
        "y[0]: A nan (0x7fc00000), B nan (0x7fc00001) (1 of 1 values differ)",
    )


@pytest.mark.parametrize(
    ("b", "text"),
    [
        (np.zeros(3, np.int16), "y: A is int8 [3], B is int16 [3]"),
        (np.zeros((3, 1), np.int8), "y: A is int8 [3], B is int8 [3, 1]"),
        (np.zeros(3, np.uint8), "y: A is int8 [3], B is uint8 [3]"),
    ],
)
def test_dtype_and_shape_are_part_of_the_value(run, b, text):
    assert run({"y": np.zeros(3, np.int8)}, {"y": b}) == (1, text)


def test_missing_array_is_a_difference(run):
    assert run({"y": np.zeros(3, np.int8)}, {}) == (1, "y: only in A, int8 [3]")
    assert run({}, {"y": np.zeros(3, np.int8)}) == (1, "y: only in B, int8 [3]")


def test_ignored_array_is_left_out(run):
    assert run({"y": np.array(1), "cycles": np.array(1)}, {"y": np.array(1)}, "--ignore", "cycles")[0] == 0
    code, text = run({"y": np.array(1)}, {"y": np.array(1)}, "--ignore", "z")
    assert (code, text) == (2, "kvant: error: --ignore z: neither archive has this array")


def test_texts_of_different_storage_width_are_equal(run):
    assert run({"format": np.array(["pq", "mant"])}, {"format": np.array(["pq", "mant", "int8x"])[:2]})[0] == 0
    assert run({"f": np.array("pq")}, {"f": np.array("mant")}) == (1, "f: A 'pq', B 'mant' (1 of 1 values differ)")


def test_empty_arrays_are_equal(run):
    assert run({"y": np.zeros((0, 4), np.float32)}, {"y": np.zeros((0, 4), np.float32)})[0] == 0


def test_trace_shows_the_cycle(run):
    widths = {"y": {"data": 40, "last": 1}}
    a = trace_arrays(Trace({"y": {"data": [1, 2], "last": [0, 1]}}, {"y": [10, 12]}, {"busy": 3}), widths)
    b = trace_arrays(Trace({"y": {"data": [1, 3 << 32], "last": [0, 1]}}, {"y": [10, 15]}, {"busy": 3}), widths)
    assert run(a, b) == (1, "y.data[1, 0]: A 2, B 0, cycle A 12, B 15 (2 of 10 values differ)")
    b = trace_arrays(Trace({"y": {"data": [1, 2], "last": [0, 0]}}, {"y": [10, 12]}, {"busy": 3}), widths)
    assert run(a, b) == (1, "y.last[1, 0]: A 1, B 0, cycle 12 (1 of 2 values differ)")


def test_cycles_are_compared_behind_all_values(run):
    a = {"y.cycle": np.array([1, 2]), "y.data": np.array([5, 6])}
    b = {"y.cycle": np.array([1, 3]), "y.data": np.array([5, 7])}
    assert run(a, b)[1].startswith("y.data[1]: A 6, B 7, cycle A 2, B 3")
    assert run(a, a | {"y.cycle": b["y.cycle"]})[1] == "y.cycle[1]: A 2, B 3 (1 of 2 values differ)"


def test_bad_file_exits_with_2(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.npz").write_text("no archive")
    monkeypatch.setattr(sys, "argv", ["kvant", "diff", str(tmp_path / "text.npz"), str(tmp_path / "none.npz")])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert "text.npz: not a readable .npz archive" in capsys.readouterr().err
