"""Codebooks of product-quantised caches through ``kvant quantize`` and ``kvant eval``, on a tiny model."""

import pytest
import torch
from tiny_models import random_tensors, write_folder

from kvant import cli, packed
from kvant.errors import InputError
from kvant.golden.models.calibration import calibration_windows, observe_layers
from kvant.golden.models.checkpoint import open_model
from kvant.golden.pq.calibration import CodebookCalibrator

TEXT = "the quick brown fox jumps over the lazy dog, 31 times a day; the other the sleeps. " * 4
KINDS = "key_2x8,value_2x8,value_4x8"


def call(*arguments):
    cli.build_app()([str(argument) for argument in arguments], standalone_mode=False)


def refused(*arguments) -> str:
    with pytest.raises(Exception) as caught:
        call(*arguments)
    assert cli.exit_code(caught.value) == 2
    return cli.one_line(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model, a text, and codebooks and tables of its caches."""
    folder = tmp_path_factory.mktemp("codebooks")
    write_folder(folder / "tiny", {name: w * 0.2 if "embed" in name else w for name, w in random_tensors().items()})
    (folder / "text.txt").write_text(TEXT)
    (folder / "calibration.txt").write_text(TEXT[::-1] * 3)
    call(
        "quantize", folder / "tiny", "-o", folder / "tables.safetensors", "--cache-only", "--calibrate",
        folder / "calibration.txt", "--group", "16", "--window", "64", "--codebooks", KINDS,
    )  # fmt: skip
    return folder


def test_the_file_holds_what_training_on_the_same_windows_gives(folder):
    found = packed.load(folder / "tables.safetensors")
    assert found.cache is not None
    assert set(found.codebooks.books) == set(KINDS.split(","))
    assert found.configuration["codebooks"] == KINDS.split(",")
    checkpoint = open_model(folder / "tiny")
    windows = calibration_windows(checkpoint, TEXT[::-1] * 3, 16384, 64)
    calibrator = CodebookCalibrator(
        KINDS.split(","), output=lambda layer: checkpoint.weight(f"model.layers.{layer}.self_attn.o_proj.weight")
    )
    for _, observers in observe_layers(checkpoint, windows, calibrator.observer):
        calibrator.add(observers)
    expected = calibrator.result()
    assert torch.equal(found.codebooks.key_mean, expected.key_mean)
    for kind, book in expected.books.items():
        assert torch.equal(found.codebooks.books[kind].entries, book.entries)
        assert torch.equal(found.codebooks.books[kind].scale, book.scale)
        assert torch.equal(found.codebooks.transforms[kind], expected.transforms[kind])


def test_a_file_survives_a_round_trip_and_refuses_damage(folder, tmp_path):
    found = packed.load(folder / "tables.safetensors")
    copy = tmp_path / "copy.safetensors"
    packed.save(copy, found.tensors, found.configuration, found.source, found.cache, found.codebooks)
    assert copy.read_bytes() == (folder / "tables.safetensors").read_bytes()
    entries = found.codebooks.books["key_2x8"].entries.numpy().tobytes()
    contents = bytearray(copy.read_bytes())
    contents[contents.index(entries) + 5] ^= 1
    copy.write_bytes(contents)
    with pytest.raises(InputError, match=r"pq\.key_2x8\.entries is damaged"):
        packed.load(copy)


def test_case_18_product_quantised_formats_differ_and_count_their_codebooks(folder, capsys):
    capsys.readouterr()
    call(
        "eval", folder / "tiny", "--text", folder / "text.txt", "--window", "48", "--tables",
        folder / "tables.safetensors", "--recent", "8", "--formats", "fp32,int8,pq4,pq4_2",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "with 8 recent" in printed
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in printed.splitlines() if line.startswith("|")}
    bits, stored, *_ = (float(cell) for cell in rows["pq4"])
    assert bits == 4
    assert float(rows["pq4_2"][0]) == 3
    # 36 coded tokens, 8 recent and 4 sinks of a head of 8 elements with one scale, 256 x 8 entries with one scale, and
    # a map of 8 x 8 fp16
    assert stored == pytest.approx((40 * 4 + 8 * 10 + 4 * 10 + 8 * (2050 + 128) / 8) / 48, abs=1e-3)
    divergence = {name: float(rows[name][5]) for name in ("int8", "pq4", "pq4_2")}
    assert 0 < divergence["int8"] < divergence["pq4"] < divergence["pq4_2"]


def test_formats_whose_codebooks_are_there_are_compared_by_default(folder, capsys):
    capsys.readouterr()
    call(
        "eval", folder / "tiny", "--text", folder / "text.txt", "--window", "48", "--windows", "1", "--tables",
        folder / "tables.safetensors",
    )  # fmt: skip
    names = {line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    assert {"pq4", "pq4_2"} <= names
    assert "pq2" not in names


def test_what_cannot_be_is_refused(folder, tmp_path):
    target = tmp_path / "x.safetensors"
    model, text = folder / "tiny", folder / "calibration.txt"
    assert "needs --calibrate" in refused("quantize", model, "-o", target, "--codebooks", "key_2x8")
    calibrated = ("quantize", model, "-o", target, "--calibrate", text, "--codebooks")
    assert "'key_3x8'" in refused(*calibrated, "key_3x8")
    assert not target.exists()
    evaluation = ("eval", model, "--text", folder / "text.txt", "--formats")
    message = refused(*evaluation, "pq4")
    assert "--codebooks KINDS" in message
    message = refused(*evaluation, "pq2", "--tables", folder / "tables.safetensors")
    assert "key_4x8" in message


def test_maps_can_be_left_out(folder, tmp_path):
    target = tmp_path / "plain.safetensors"
    call(
        "quantize", folder / "tiny", "-o", target, "--cache-only", "--calibrate", folder / "calibration.txt",
        "--group", "16", "--window", "64", "--codebooks", "key_2x8", "--no-maps",
    )  # fmt: skip
    found = packed.load(target)
    assert found.codebooks.transforms == {}
    assert found.configuration["maps"] is False
    assert torch.equal(found.codebooks.mean("key_2x8"), found.codebooks.key_mean)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a * 0, "can be inverted"),
        (lambda a: a * float("nan"), "finite"),
        (lambda a: a[..., :4], "shape"),
    ],
)
def test_maps_that_cannot_be_used_are_refused(folder, tmp_path, change, text):
    found = packed.load(folder / "tables.safetensors")
    found.codebooks.transforms["value_2x8"] = change(found.codebooks.transforms["value_2x8"])
    packed.save(tmp_path / "bad.safetensors", {}, {}, found.source, None, found.codebooks)
    with pytest.raises(InputError, match=rf"pq\.value_2x8\.transform.*{text}"):
        packed.load(tmp_path / "bad.safetensors")
