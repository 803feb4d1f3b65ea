"""``kvant run`` as a user runs it, on a tiny model."""

import re

import numpy as np
import pytest
from tiny_models import random_tensors, write_folder

from kvant import cli
from kvant.commands import run as command
from kvant.golden.models import fetch
from kvant.golden.models.generate import Decoder
from kvant.sim.compiled.attention import CompiledEngine
from kvant.sim.compiled.linear import CompiledLinear

ARRAY = ["--rows", "4", "--cols", "4", "--set", "group=16", "--set", "accumulators=8", "--set", "activation_words=160"]
TEXT = "the quick brown fox jumps over the lazy dog, 31 times a day; the other the sleeps. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model, and tables of its caches."""
    folder = tmp_path_factory.mktemp("run")
    tensors = {name: w * 0.2 if "embed" in name else w for name, w in random_tensors().items()}
    write_folder(folder / "tiny", tensors)
    (folder / "calibration.txt").write_text(TEXT)
    options = ["--cache-only", "--calibrate", folder / "calibration.txt", "--group", "16", "--window", "64"]
    options += ["--codebooks", "key_2x8,value_2x8"]
    arguments = ["quantize", folder / "tiny", "-o", folder / "tables.safetensors", *options]
    cli.build_app()([str(argument) for argument in arguments], standalone_mode=False)
    return folder


@pytest.fixture
def run(capsys, folder):
    """Run the command on the tiny model in this process: gives what was printed, or raises."""

    def call(*arguments) -> str:
        capsys.readouterr()
        chosen = ["run", folder / "tiny", "--prompt", "the brown dog", "--raw", "--tokens", 4, *ARRAY, *arguments]
        cli.build_app()(list(map(str, chosen)), standalone_mode=False)
        return capsys.readouterr().out

    return call


def decoded(printed: str) -> str:
    """The text in front of the summary."""
    return printed.partition("\n\n")[0]


CACHES = ["fp32", "mant_time_integer", "mant", "pq4", pytest.param("int8", marks=pytest.mark.long)]
PQ_OPTIONS = ["--recent", 2, "--set", "decode_tokens=12"]


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_those_of_the_golden_model(run, folder, cache):
    options = ["--cache", cache, "--tables", folder / "tables.safetensors", "--tokens", 12, *PQ_OPTIONS]
    printed = run("--check", *options)
    assert "the same 12 tokens, every tensor of every layer equal in every bit" in printed
    in_rtl = cache in ("mant", "int8", "pq4")
    name = {"mant": "mant_head"}.get(cache, cache)
    words = f"; attention and cache ({name}): " if in_rtl else f"In the golden model: attention and cache ({name})."
    assert words in printed
    assert re.search(rf"^attention +{'RTL +[0-9,]+ +[0-9,]+' if in_rtl else 'golden model'} ", printed, re.MULTILINE)


def test_attention_of_the_golden_model_gives_the_same_trace(run, folder, tmp_path, capsys):
    for place in ("rtl", "golden"):
        printed = run(
            *["--cache", "mant", "--tables", folder / "tables.safetensors", "--attention", place],
            *["--trace", tmp_path / f"{place}.npz"],
        )
        assert ("In the golden model: attention" in printed) == (place == "golden")
    files = [str(tmp_path / f"{place}.npz") for place in ("rtl", "golden")]
    cli.build_app()(["diff", *files], standalone_mode=False)
    assert "step1.model.layers.1.self_attn.attention" in np.load(files[0])


def test_check_fails_where_attention_differs(run, folder, monkeypatch):
    attend = CompiledEngine.attend

    def faulty(self, *arguments):
        out, *numbers = attend(self, *arguments)
        out.view(np.uint32)[1, 0, 3] ^= 1
        return out, *numbers

    monkeypatch.setattr(CompiledEngine, "attend", faulty)
    with pytest.raises(
        Exception, match=r"step0.model.layers.0.self_attn.attention\[3, 0, \d+\].*A is the RTL"
    ) as caught:
        run("--check", "--cache", "mant", "--tables", folder / "tables.safetensors")
    assert cli.exit_code(caught.value) == 1


def test_figures_are_split_by_part_and_add_up(run):
    printed = run()
    rows = dict(re.findall(r"^(q/k/v|o|mlp|head|all) +(?:RTL)? +([\d,]+ +[\d,]+)", printed, re.MULTILINE))
    numbers = {part: [int(n.replace(",", "")) for n in text.split()] for part, text in rows.items()}
    assert set(numbers) == {"q/k/v", "o", "mlp", "head", "all"}
    for column in range(2):
        assert sum(row[column] for part, row in numbers.items() if part != "all") == numbers["all"][column]
    assert re.search(r"^attention +golden model", printed, re.MULTILINE)
    assert re.search(r"^host +host", printed, re.MULTILINE)


def test_runs_are_equal_and_pauses_change_no_bit(run, tmp_path):
    texts = {decoded(run("--trace", tmp_path / f"{stall}.npz", "--stall", stall)) for stall in (0, 0.3)}
    assert len(texts) == 1
    cli.build_app()(["diff", str(tmp_path / "0.npz"), str(tmp_path / "0.3.npz")], standalone_mode=False)


def test_diff_of_traces_names_the_first_layer_that_differs(run, tmp_path, capsys, monkeypatch):
    run("--trace", tmp_path / "right.npz")
    multiply = CompiledLinear.multiply
    calls = []

    def faulty(self, x, weights):
        product = multiply(self, x, weights)
        calls.append(weights)
        if len(calls) == 12:  # layer 1, gate_proj of the prefill
            product.y[2, 5] += 1
        return product

    monkeypatch.setattr(CompiledLinear, "multiply", faulty)
    run("--trace", tmp_path / "wrong.npz")
    code = cli.build_app()(["diff", str(tmp_path / "right.npz"), str(tmp_path / "wrong.npz")], standalone_mode=False)
    assert code == 1
    assert capsys.readouterr().out.startswith("step0.model.layers.1.mlp.gate_proj.output[0, 2, 5]: A ")


def test_check_fails_where_the_rtl_differs(run, monkeypatch):
    multiply = CompiledLinear.multiply

    def faulty(self, x, weights):
        product = multiply(self, x, weights)
        product.y.view(np.uint32)[0, 0] ^= 1
        return product

    monkeypatch.setattr(CompiledLinear, "multiply", faulty)
    with pytest.raises(
        Exception, match=r"step0.model.layers.0.self_attn.q_proj.output\[0, 0, 0\].*A is the RTL"
    ) as caught:
        run("--check")
    assert cli.exit_code(caught.value) == 1


def test_given_weights_are_used(run, folder, tmp_path):
    path = tmp_path / "packed.safetensors"
    arguments = ["quantize", folder / "tiny", "-o", path, "--group", "16", "--outlier-groups", "2.5"]
    cli.build_app()([str(argument) for argument in arguments], standalone_mode=False)
    assert "equal in every bit" in run("--check", "--weights", path)
    with pytest.raises(Exception, match="has INT8 groups; legal only with int8_groups = true"):
        run("--weights", path, "--set", "int8_groups=false")
    with pytest.raises(Exception, match="quantised in groups of 16; legal is 8"):
        run("--weights", path, "--set", "group=8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "--prompt: empty"),
        (["--tokens", "0"], "--tokens 0: legal is 1 or more"),
        (["--tokens", "200"], "more than the model's context; legal is up to"),
        (["--cache", "q4"], "--cache 'q4': legal are mant, fp32"),
        (["--cache", "int8", "--set", "capacity=6", "--set", "group=2"], "capacity = 6: legal is "),
        (["--cache", "int8", "--set", "queries=65"], "queries = 65"),
        (["--attention", "host"], "--attention host: legal is rtl or golden"),
        (["--cache", "pq4"], "--cache pq4: needs --tables"),
        (["--trace", "trace.txt"], "legal is a file that ends in .npz"),
        (["--stall", "1"], "legal is a probability from 0 to below 1"),
        (["--threads", "0"], "threads = 0"),
        (["--set", "activation_words=4"], "activation_words = 4"),
    ],
)
def test_bad_input_is_refused_in_one_line(run, arguments, words):
    with pytest.raises(Exception) as caught:
        run(*arguments)
    assert cli.exit_code(caught.value) == 2
    assert words in cli.one_line(caught.value)


def test_a_prompt_without_template_has_to_be_raw(folder):
    with pytest.raises(Exception, match=r"brings no chat template.*--raw"):
        cli.build_app()(["run", str(folder / "tiny"), "--prompt", "Hello"], standalone_mode=False)


def test_an_unknown_model_is_refused(kvant, assert_one_line_error):
    assert_one_line_error(kvant("run", "nonsense", "--prompt", "x"), "nonsense", "not found")


def test_an_interrupt_frees_the_model(folder, monkeypatch):
    closed = []

    def close(self):
        closed.append(self)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(CompiledLinear, "close", close)
    monkeypatch.setattr(Decoder, "step", interrupted)
    arguments = ["run", str(folder / "tiny"), "--prompt", "the", "--raw", *ARRAY]
    assert cli.build_app()(arguments, standalone_mode=False) == cli.INTERRUPTED
    assert len(closed) == 1


@pytest.mark.long
@pytest.mark.skipif(fetch.cached_path("smollm2") is None, reason="kvant model fetch smollm2 has not been run")
def test_smollm2_answers_as_the_golden_model_does(capsys):
    arguments = ["run", "smollm2", "--raw", "--prompt", "The capital of France is", "--tokens", "3"]
    cli.build_app()([*arguments, "--rows", "16", "--cols", "16", "--check"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert printed.startswith(" Paris")
    assert "equal in every bit" in printed
    assert command.DEFAULT_CACHE in printed
