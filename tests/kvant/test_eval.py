"""``kvant eval`` as a user runs it, on a tiny model."""

import contextlib
import csv
import json
import math
import re

import numpy as np
import pytest
import torch
import typer
from tiny_models import CONFIG, random_tensors, write_folder

from kvant import cli, packed
from kvant.commands.eval import CALIBRATED_FORMATS, DEFAULT_FORMATS
from kvant.golden.models import evaluate as golden
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.llama import Llama
from kvant.golden.models.tokenizer import encode, load_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, 31 times a day; the other the sleeps. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model, a text, and tables of its caches."""
    folder = tmp_path_factory.mktemp("eval")
    tensors = {name: w * 0.2 if "embed" in name else w for name, w in random_tensors().items()}
    write_folder(folder / "tiny", tensors)
    (folder / "text.txt").write_text(TEXT)
    (folder / "calibration.txt").write_text(TEXT[::-1] * 3)
    options = ["--cache-only", "--calibrate", folder / "calibration.txt", "--group", "16", "--window", "64"]
    arguments = ["quantize", folder / "tiny", "-o", folder / "tables.safetensors", *options]
    cli.build_app()([str(argument) for argument in arguments], standalone_mode=False)
    return folder


@pytest.fixture
def run(capsys, folder):
    """Run the command on the tiny model in this process: gives what was printed, or raises."""

    def call(*arguments) -> str:
        capsys.readouterr()
        cli.build_app()(["eval", str(folder / "tiny"), *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    return call


@pytest.fixture
def refusal(run):
    """Run the command, be refused with exit code 2, and give the one line it would print."""

    def call(*arguments) -> str:
        with pytest.raises(Exception) as caught:
            run(*arguments)
        assert cli.exit_code(caught.value) == 2
        return cli.one_line(caught.value)

    return call


def table(printed: str) -> dict[str, list[float]]:
    """Figures of the Markdown table by format."""
    rows = [line.strip("| ").split("|") for line in printed.splitlines() if line.startswith("|")][2:]
    return {cells[0].strip(): [float(cell) for cell in cells[1:]] for cells in rows}


def test_case_53_unquantised_perplexity_is_that_of_an_independent_computation(run, folder):
    printed = run("--text", folder / "text.txt", "--window", "48", "--formats", "fp32")
    checkpoint = open_model(folder / "tiny")
    tokens = encode(load_tokenizer(checkpoint), TEXT)
    total, count = 0.0, 0
    for start in range(0, len(tokens), 48):
        piece = torch.tensor(tokens[start : start + 48])
        probabilities = Llama(checkpoint).logits(piece[None])[0].double().softmax(-1)
        for position in range(1, len(piece)):
            total -= math.log(probabilities[position - 1, piece[position]])
            count += 1
    found = table(printed)["fp32"]
    assert found[2] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found[3:] == [0, 0, 0, 0]
    windows = -(-len(tokens) // 48)
    assert printed.startswith(
        f"protocol: {windows} windows of up to 48 tokens, stride a window, no BOS, first token of a window not "
        f"predicted, {count} tokens counted, float32\n"
    )


def test_formats_are_compared_on_the_same_windows(run, folder):
    options = ("--text", folder / "text.txt", "--window", "64", "--tables", folder / "tables.safetensors")
    printed = run(*options, "--windows", "2")
    found = table(printed)
    assert list(found) == [*DEFAULT_FORMATS, *CALIBRATED_FORMATS]
    assert found["fp32"][:2] == [32, 32] and found["mant_time"][0] == pytest.approx((5.5 + 5.5625) / 2, abs=1e-3)
    assert 0 < found["int8"][5] < found["mant_time"][5] < 0.1
    assert found["mant_time"][1] > found["mant_time"][0]
    assert "caches: groups of 16, 4 sinks, first call 1 token(s)" in printed
    assert re.search(
        r"^tables: tables\.safetensors, from \d+ tokens of calibration\.txt in windows of 64$", printed, re.M
    )
    assert table(run(*options, "--windows", "2", "--formats", "mant_time"))["mant_time"] == found["mant_time"]
    other = run(*options, "--windows", "2", "--formats", "mant_time", "--sinks", "0", "--prefill", "0")
    assert table(other)["mant_time"] != found["mant_time"] and "0 sinks, first call all of a window" in other


def test_token_windows_are_taken_as_they_are(run, refusal, folder, tmp_path):
    tokens = encode(load_tokenizer(open_model(folder / "tiny")), TEXT)
    path = tmp_path / "windows.npy"
    np.save(path, np.array([tokens[:40], tokens[40:80]], dtype=np.int32))
    found = table(run("--token-windows", path, "--formats", "int8"))
    assert found == table(run("--text", folder / "text.txt", "--window", "40", "--windows", "2", "--formats", "int8"))
    np.save(path, np.zeros((2, 3, 4), dtype=np.int32))
    assert "shape (2, 3, 4); legal is an integer array [windows, length]" in refusal("--token-windows", path)
    np.save(path, np.full((1, 8), CONFIG["vocab_size"], dtype=np.int32))
    assert "legal is 0..299" in refusal("--token-windows", path)
    assert "--stride, --bos: legal with --text only" in refusal("--token-windows", path, "--bos", "1")
    path.write_bytes(b"no array")
    assert "not a readable .npy array" in refusal("--token-windows", path)


def test_stride_and_bos_are_stated_and_count_every_token_once(run, folder):
    tokens = len(encode(load_tokenizer(open_model(folder / "tiny")), TEXT))
    printed = run("--text", folder / "text.txt", "--window", "32", "--stride", "20", "--bos", "3", "--formats", "fp16")
    assert f"stride 20, BOS 3, {tokens} tokens counted" in printed


@pytest.mark.parametrize("suffix", [".csv", ".md", ".json"])
def test_table_is_written(run, folder, tmp_path, suffix):
    output = tmp_path / f"table{suffix}"
    options = ("--text", folder / "text.txt", "--window", "32", "--windows", "1", "--formats", "int8,nf4", "-o", output)
    printed = run(*options)
    assert printed.endswith(f"written: {output}\n") and [path.name for path in tmp_path.iterdir()] == [output.name]
    if suffix == ".csv":
        rows = list(csv.DictReader(output.open()))
        assert [row["format"] for row in rows] == ["int8", "nf4"]
        assert float(rows[1]["kl"]) == table(printed)["nf4"][5]
    elif suffix == ".md":
        assert table(output.read_text()) == table(printed)
    else:
        assert [row["tokens"] for row in json.loads(output.read_text())] == [31, 31]


def test_interrupted_run_continues(run, folder, tmp_path, monkeypatch):
    output = tmp_path / "table.csv"
    options = ("--text", folder / "text.txt", "--window", "32", "--windows", "3", "--formats", "int8", "-o", output)
    expected = run(*options)
    whole, done = golden.window_losses, []

    def stop_at_third(reference, models, window, step):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(window)
        return whole(reference, models, window, step)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # one window after the other
    monkeypatch.setattr(golden, "window_losses", stop_at_third)
    with contextlib.suppress(KeyboardInterrupt, typer.Abort):  # typer turns the one into the other, or into a number
        run(*options)
    assert (tmp_path / "table.csv.partial").is_file()

    def count(reference, models, window, step):
        done.append(window)
        return whole(reference, models, window, step)

    monkeypatch.setattr(golden, "window_losses", count)
    assert run(*options) == expected and len(done) == 3
    assert not (tmp_path / "table.csv.partial").exists()
    run(*options, "--group", "32")
    assert len(done) == 6


def test_quantised_weights_are_measured_against_the_unquantised_model(run, refusal, folder, tmp_path):
    path = tmp_path / "packed.safetensors"
    cli.build_app()(["quantize", str(folder / "tiny"), "-o", str(path)], standalone_mode=False)
    options = ("--text", folder / "text.txt", "--window", "32", "--windows", "2", "--formats", "fp32")
    assert table(run(*options, "--weights", path))["fp32"][5] > 0
    assert "holds no weights" in refusal(*options, "--weights", folder / "tables.safetensors")
    assert "holds no tables of caches" in refusal(*options, "--tables", path)


def test_tables_of_another_model_are_refused(refusal, folder, tmp_path):
    found = packed.load(folder / "tables.safetensors")
    path = tmp_path / "other.safetensors"
    packed.save(path, {}, found.configuration, found.source | {"sha256": "0" * 64}, found.cache)
    line = refusal("--text", folder / "text.txt", "--tables", path)
    assert line.startswith(f"--tables {path}: ") and "is not that of the model" in line


def test_shorter_calibration_windows_are_pointed_out(run, folder):
    options = ("--text", folder / "text.txt", "--window", "100", "--windows", "1", "--formats", "mant_time")
    assert "calibrate with --window 100" in run(*options, "--tables", folder / "tables.safetensors")


@pytest.mark.parametrize(
    "options, text",
    [
        ((), "--text, --token-windows: legal is one of them"),
        (("--text", "TEXT", "--formats", "int5"), "--formats 'int5': legal are fp32, "),
        (("--text", "TEXT", "--formats", "mant_time"), "--formats mant_time: needs --tables"),
        (("--text", "TEXT", "--window", "200"), "window of 200 tokens: legal is up to 128, the model's context"),
        (("--text", "TEXT", "-o", "x.pdf"), "-o x.pdf: suffix '.pdf'; legal is one of .csv, .md, .json"),
        (("--text", "EMPTY"), "text of 0 tokens: at least 2 are needed to predict one"),
        (("--text", "missing.txt"), "missing.txt: No such file or directory"),
        (("--text", "TEXT", "--tables", "TABLES", "--group", "32"), "group = 32: the tables were fitted for 16"),
    ],
)
def test_bad_input_is_refused_in_one_line(refusal, folder, tmp_path, options, text):
    (tmp_path / "empty.txt").write_text("")
    places = {"TEXT": folder / "text.txt", "EMPTY": tmp_path / "empty.txt", "TABLES": folder / "tables.safetensors"}
    assert refusal(*(places.get(option, option) for option in options)).startswith(text)


def test_formats_are_listed(run):
    printed = run("--formats", "list")
    assert "mant_time " in printed and "(needs --tables)" in printed and "fp32" in printed
