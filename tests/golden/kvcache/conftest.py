"""Fixtures: a tiny random model."""

import pytest
from tiny_models import random_tensors, write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The tiny model as a Hugging Face folder."""
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", random_tensors())
