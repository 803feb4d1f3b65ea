"""The committed piece of the real model."""

import numpy as np
import pytest

from kvant.golden.models import slice as model_slice
from kvant.golden.models.errors import ModelError

SLICE = model_slice.load()


def test_it_stays_small():
    assert model_slice.PATH.stat().st_size <= 2_000_000


def test_tiles_have_weights_and_the_inputs_they_met():
    assert set(SLICE.tiles) == {"L5_q_proj", "L5_down_proj", "L20_q_proj", "L20_down_proj"}
    for short, tile in SLICE.tiles.items():
        inputs = 576 if "q_proj" in short else 1536
        assert tile.weight.shape == (128, inputs) and tile.weight.dtype == np.float32
        assert tile.activations.shape == (64, inputs) and tile.activations.dtype == np.float16
        assert np.isfinite(tile.weight).all() and np.isfinite(tile.activations).all()
        assert f"layers.{short[1:].partition('_')[0]}." in tile.name


def test_weights_are_those_of_the_4_bit_file():
    """Q4_1 gives blocks of 32 at most 16 values."""
    for tile in SLICE.tiles.values():
        for block in tile.weight.reshape(-1, 32)[::97]:
            assert len(np.unique(block)) <= 16


def test_attention_has_all_kv_heads_from_the_first_token():
    assert set(SLICE.attention) == {5, 20}
    for part in SLICE.attention.values():
        assert part.keys.shape == part.values.shape == (3, len(SLICE.tokens), 64)
        assert part.queries.shape == (9, 32, 64)


def test_arrays_cannot_be_changed_by_accident():
    with pytest.raises(ValueError, match="read-only"):
        SLICE.tokens[0] = 0


def test_missing_or_damaged_file_is_refused_in_one_line(tmp_path):
    damaged = tmp_path / "slice.npz"
    with pytest.raises(ModelError, match="make_slice"):
        model_slice.load(damaged)
    damaged.write_bytes(model_slice.PATH.read_bytes()[:1000])
    with pytest.raises(ModelError, match="make_slice"):
        model_slice.load(damaged)
    with np.load(model_slice.PATH) as archive:
        arrays = {name: archive[name] for name in archive.files if name != "L5_values"}
    np.savez(damaged, **arrays)
    with pytest.raises(ModelError, match="L5_values"):
        model_slice.load(damaged)


@pytest.mark.long
def test_the_script_makes_the_committed_piece(smollm2):
    from pathlib import Path

    from kvant.golden.models.make_slice import make

    made = make("smollm2", (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8"))
    with np.load(model_slice.PATH) as archive:
        assert set(made) == set(archive.files)
        for name, array in made.items():
            if array.dtype == np.float16:  # a float32 sum depends on the machine
                np.testing.assert_allclose(array.astype(np.float32), archive[name].astype(np.float32), 0.01, 0.01)
            else:
                assert np.array_equal(array, archive[name]), name
