"""Second moments from text."""

import pytest
import torch
from tiny_models import CONFIG

from kvant.golden.models.calibration import calibrate, calibration_windows, digest, output_energy
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.evaluate import split_windows
from kvant.golden.models.llama import Llama

GROUP = 32  # of 48 and 80 inputs: the last group is short
WINDOWS = split_windows([n * 17 % CONFIG["vocab_size"] for n in range(100)], 24)


@pytest.fixture(scope="module")
def inputs(folder):
    """Input of every linear layer over all windows, [T, K] by name of the weight, from whole forwards."""
    seen = {}
    model = Llama(open_model(folder))
    for window in WINDOWS:
        model.logits(window[None], lambda name, x: seen.setdefault(name, []).append(x[0]))
    return {name: torch.cat(parts).double() for name, parts in seen.items() if name.endswith(".weight")}


def test_full_moments_are_the_blocks_of_the_input_covariance(folder, inputs):
    moments = calibrate(open_model(folder), WINDOWS, GROUP).moments
    assert set(moments) == set(inputs)
    for name, x in inputs.items():
        full = x.T @ x / len(x)
        for number, block in enumerate(moments[name]):
            first = number * GROUP
            length = min(GROUP, x.shape[1] - first)
            expected = full[first : first + length, first : first + length]
            torch.testing.assert_close(block[:length, :length].double(), expected, rtol=1e-4, atol=1e-6)
            assert not block[length:].any() and not block[:, length:].any()


def test_diagonal_moments_are_mean_squares(folder, inputs):
    moments = calibrate(open_model(folder), WINDOWS, GROUP, diagonal=True).moments
    for name, x in inputs.items():
        torch.testing.assert_close(moments[name].double(), x.square().mean(0), rtol=1e-4, atol=1e-6)


def test_energy_is_that_of_the_outputs_group_by_group(folder, inputs):
    name = "model.layers.1.mlp.down_proj.weight"
    checkpoint = open_model(folder)
    w, x = checkpoint.weight(name).double(), inputs[name]
    expected = sum(
        (x[:, first : first + GROUP] @ w[:, first : first + GROUP].T).square().sum() / len(x)
        for first in range(0, x.shape[1], GROUP)
    )
    moment = calibrate(checkpoint, WINDOWS, GROUP).moments[name]
    assert output_energy(w.float(), moment, GROUP) == pytest.approx(float(expected), rel=1e-4)
    diagonal = moment.diagonal(dim1=1, dim2=2).flatten()[: x.shape[1]]
    expected = float((w.square() * x.square().mean(0)).sum())
    assert output_energy(w.float(), diagonal, GROUP) == pytest.approx(expected, rel=1e-4)


def test_only_the_weights_asked_for_are_collected(folder):
    name = "model.layers.0.self_attn.v_proj.weight"
    assert list(calibrate(open_model(folder), WINDOWS, GROUP, names=[name]).moments) == [name]


def test_progress_counts_the_layers(folder):
    steps = []
    calibrate(open_model(folder), WINDOWS, GROUP, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]


def test_windows_are_cut_from_the_first_tokens(folder):
    windows = calibration_windows(open_model(folder), "abc" * 100, tokens=50, window=20)
    assert [len(window) for window in windows] == [20, 20, 10]


@pytest.mark.parametrize(("text", "window"), [("", 20), ("a", 20), ("abc", 1), ("abc", 129)])
def test_text_or_window_that_cannot_calibrate_is_refused(folder, text, window):
    with pytest.raises(ModelError):
        calibration_windows(open_model(folder), text, tokens=50, window=window)


def test_digest_tells_texts_and_cuts_apart():
    tokens = list(range(40))
    assert digest(split_windows(tokens, 20)) == digest(split_windows(tokens, 20))
    assert digest(split_windows(tokens, 20)) != digest(split_windows(tokens, 10))
    assert digest(split_windows(tokens, 20)) != digest(split_windows(tokens[::-1], 20))


def test_activations_that_are_not_finite_name_the_layer(tmp_path, tensors):
    from tiny_models import write_folder

    name = "model.layers.1.mlp.up_proj.weight"
    broken = write_folder(tmp_path, tensors | {name: torch.full_like(tensors[name], torch.inf)})
    with pytest.raises(ModelError, match="layer 1: activations"):
        calibrate(open_model(broken), WINDOWS, GROUP)
