"""Fixtures: a tiny random model in two file formats, and the real one where it has been fetched."""

import pytest
from tiny_models import random_tensors, write_folder, write_gguf

from kvant.golden.models import fetch


@pytest.fixture(scope="session")
def tensors():
    """Weights of the tiny model."""
    return random_tensors()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tensors):
    """The tiny model as a Hugging Face folder."""
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", tensors)


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory, tensors):
    """The tiny model as a GGUF, all F32."""
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", tensors)


@pytest.fixture(scope="session")
def smollm2():
    """The real model, opened; the test is skipped where it has not been fetched."""
    from kvant.golden.models.checkpoint import open_model

    if fetch.cached_path("smollm2") is None:
        pytest.skip("SmolLM2 is not in the cache: kvant model fetch smollm2")
    return open_model("smollm2")
