"""``kvant eval`` on number formats of weights and activations, on a tiny model."""

import contextlib
import json

import pytest
import torch
import typer
from tiny_models import CONFIG, random_tensors, write_folder

from kvant import cli, eval_weights
from kvant.commands.eval import PAPERS_FORMATS
from kvant.golden.formats.mant import FORMATS
from kvant.golden.kvcache.formats import CACHE_FORMATS
from kvant.golden.models import weight_formats as golden
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.evaluate import evaluate, split_windows
from kvant.golden.models.llama import Llama
from kvant.golden.models.tokenizer import encode, load_tokenizer
from kvant.golden.numeric.int8 import quantize_int8

TEXT = "the quick brown fox jumps over the lazy dog, 31 times a day; the other the sleeps. " * 4
TOKENS = torch.arange(40)[None] * 7 % CONFIG["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval_weights")
    tensors = {name: w * 0.2 if "embed" in name else w for name, w in random_tensors().items()}
    write_folder(folder / "tiny", tensors)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run(capsys, folder):
    """Run the command on the tiny model and the text; what was printed."""

    def call(*arguments) -> str:
        capsys.readouterr()
        options = ["--text", folder / "text.txt", "--window", "64", *arguments]
        cli.build_app()(["eval", str(folder / "tiny"), *map(str, options)], standalone_mode=False)
        return capsys.readouterr().out

    return call


def figures(path) -> dict[str, dict]:
    return {row["format"]: row for row in json.loads(path.read_text())}


def test_figures_are_those_of_the_model_with_such_weights(run, folder, tmp_path):
    printed = run("--weight-formats", "fp32,int4,mant,gobo", "--group", "16", "-o", tmp_path / "w.json")
    assert "weights: groups of 16, scales full range, by weight error, inputs of linear layers in float32" in printed
    assert "caches:" not in printed
    found = figures(tmp_path / "w.json")
    assert list(found) == ["w:fp32", "w:int4", "w:mant", "w:gobo"]
    checkpoint = open_model(folder / "tiny")
    tokens = encode(load_tokenizer(checkpoint), TEXT)
    for name in ("int4", "mant"):
        stored = {i.name: FORMATS[name].quantize(checkpoint.weight(i.name), 16) for i in checkpoint.linear_weights}
        model = Llama(checkpoint, {n: s.values for n, s in stored.items()})
        expected = evaluate(model, split_windows(tokens, 64), Llama(checkpoint))
        row = found[f"w:{name}"]
        assert row["tokens"] == expected.tokens
        assert row["nll"] / row["tokens"] == pytest.approx(expected.nll, rel=1e-5)
        assert row["kl"] / row["tokens"] == pytest.approx(expected.kl, rel=1e-3)
        elements = sum(checkpoint.weight(n).numel() for n in stored)
        bits = sum(s.bits * s.values.numel() for s in stored.values()) / elements
        assert row["bits"] == row["bits_stored"] == pytest.approx(bits)
    assert found["w:fp32"]["kl"] == 0 and found["w:fp32"]["bits"] == 32


def test_searched_scales_and_int8_activations_change_the_figures(run, tmp_path):
    options = ("--weight-formats", "int4", "--group", "16", "-o")
    run(*options, tmp_path / "plain.json")
    run("--scale-search", *options, tmp_path / "searched.json")
    run("--activations", "int8", *options, tmp_path / "a8.json")
    (plain,), (searched,), (a8,) = (figures(tmp_path / f"{n}.json").values() for n in ("plain", "searched", "a8"))
    assert a8["format"] == "w:int4 a:int8"
    assert len({plain["kl"], searched["kl"], a8["kl"]}) == 3


def test_activations_alone_and_beside_caches(run, tmp_path):
    printed = run("--activations", "int8", "--formats", "int8", "-o", tmp_path / "both.json")
    assert "caches: groups of 64" in printed and "INT8 groups" in printed
    found = figures(tmp_path / "both.json")
    assert list(found) == ["int8", "w:fp32 a:int8"]
    assert 0 < found["w:fp32 a:int8"]["kl"] / found["w:fp32 a:int8"]["tokens"] < 0.05


def test_formats_that_are_done_are_not_quantised_again(run, tmp_path, monkeypatch):
    target = tmp_path / "w.json"
    real, made, interrupt = golden.in_format, [], [True]

    def interrupted(model, format_, **options):
        if format_.name == "nf4" and interrupt:
            interrupt.clear()
            raise KeyboardInterrupt
        made.append(format_.name)
        return real(model, format_, **options)

    monkeypatch.setattr(golden, "in_format", interrupted)
    with contextlib.suppress(KeyboardInterrupt, typer.Exit):
        run("--weight-formats", "int4,nf4", "-o", target)
    assert not interrupt and (tmp_path / "w.json.weights.partial").is_file()
    run("--weight-formats", "int4,mxfp4,nf4", "-o", target)
    assert made == ["int4", "mxfp4", "nf4"]
    assert list(figures(target)) == ["w:int4", "w:mxfp4", "w:nf4"]
    assert not (tmp_path / "w.json.weights.partial").exists()


def test_preset_of_the_papers_in_one_short_window(run):
    assert set(eval_weights.PAPERS) <= {"fp32", *FORMATS} and set(PAPERS_FORMATS) <= set(CACHE_FORMATS)
    printed = run("--preset", "papers", "--quick", "--window", "48")
    assert "protocol: 1 windows of up to 48 tokens" in printed
    table = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")][2:]
    assert table == [*PAPERS_FORMATS, *(f"w:{name}" for name in eval_weights.PAPERS)]


def test_weight_formats_are_listed(run):
    assert run("--weight-formats", "list").split() == ["fp32", *FORMATS]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--weight-formats", "int5"), "--weight-formats 'int5': legal are fp32, mant"),
        (("--activations", "int4"), "--activations 'int4': legal is int8"),
        (("--preset", "paper"), "--preset 'paper': legal is papers"),
    ],
)
def test_bad_options_are_refused_in_one_line(run, options, text):
    with pytest.raises(Exception) as caught:
        run(*options)
    assert cli.exit_code(caught.value) == 2
    line = cli.one_line(caught.value)
    assert text in line and "\n" not in line


def test_inputs_of_decoder_layers_alone_are_rounded(folder):
    model = Llama(open_model(folder / "tiny"))
    seen = []

    def inputs(x):
        seen.append(x.shape[-1])
        return golden.int8_inputs(16)(x)

    rounded = model.rounding(inputs)
    assert not torch.equal(rounded.logits(TOKENS), model.logits(TOKENS))
    assert len(seen) == 7 * CONFIG["num_hidden_layers"]
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    groups = quantize_int8(x.half(), 16)
    expected = groups.q * groups.scale.float().repeat_interleave(16, -1)[..., :40]
    assert torch.equal(golden.int8_inputs(16)(x), expected)


def test_weights_and_the_model_itself_stay_as_they_were(folder):
    model = Llama(open_model(folder / "tiny"))
    before = model.logits(TOKENS)
    changed, bits = golden.in_format(model, FORMATS["int4_tensor"])
    assert bits == 4
    assert not torch.equal(changed.logits(TOKENS), before) and torch.equal(model.logits(TOKENS), before)
