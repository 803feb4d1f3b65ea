"""Linear layers of transformers' models replaced by quantised ones, and what importing all this asks for."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from tiny_models import CONFIG, random_tensors, write_folder
from torch import nn
from transformers import AutoModelForCausalLM

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.calibration import CacheCalibrator
from kvant.golden.linear.engine import quantized_linear
from kvant.golden.linear.objective import second_moment
from kvant.golden.linear.search import quantize_weights
from kvant.golden.models import huggingface
from kvant.golden.models.calibration import observe_layers
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.huggingface import QuantizedLinear, calibrate_cache, input_moments, quantize_model
from kvant.golden.models.llama import Llama

GROUP = 16
WINDOWS = [torch.randint(0, CONFIG["vocab_size"], (40,), generator=torch.Generator().manual_seed(s)) for s in (0, 1)]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, random_tensors())


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def layer(inputs: int = 40, outputs: int = 6, **options):
    """A quantised layer with a short last group, and what it was made of."""
    random = torch.Generator().manual_seed(2)
    weights = quantize_weights(torch.randn(outputs, inputs, generator=random), GROUP, **options)
    bias = torch.randn(outputs, generator=random)
    return QuantizedLinear(weights, bias), weights, bias


@pytest.mark.parametrize("options", [{}, {"outlier_groups": 2.0}], ids=["mant", "int8_groups"])
def test_outputs_have_the_bits_of_the_engine(options):
    module, weights, bias = layer(**options)
    x = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(4))
    expected = quantized_linear(x.half().flatten(0, 1), weights).view(2, 5, 6) + bias
    assert torch.equal(module(x), expected)
    assert torch.equal(module(x.half()), expected.half())
    module.bias = None
    assert torch.equal(module(x), expected - bias) or torch.equal(module(x) + bias, expected)


def test_inputs_beyond_fp16_saturate():
    module, *_ = layer()
    x = torch.full((1, 40), 1e6)
    assert torch.equal(module(x), module(torch.full((1, 40), 65504.0)))


def test_planes_keep_their_types_and_can_be_saved():
    module, *_ = layer(outlier_groups=2.0)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    expected = module(x)
    module.half()
    assert (module.codes.dtype, module.int8.dtype) == (torch.uint8, torch.int8)
    assert torch.equal(module(x), expected)
    other, *_ = layer(outlier_groups=2.0)
    other.codes.zero_()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), expected)


def test_model_is_quantised_as_its_weights_are_in_the_golden_forward(folder, model):
    checkpoint = open_model(folder)
    moments = {f"{name}.weight": m for name, m in input_moments(model, WINDOWS, group=GROUP).items()}
    names = quantize_model(model, group=GROUP, moments={n.removesuffix(".weight"): m for n, m in moments.items()})
    assert sorted(f"{name}.weight" for name in names) == sorted(info.name for info in checkpoint.linear_weights)
    replaced = {f"{name}.weight": model.get_submodule(name).weights.dequantize() for name in names}
    for name, value in replaced.items():
        expected = quantize_weights(checkpoint.weight(name), GROUP, second_moment=moments[name])
        assert torch.equal(value, expected.dequantize())
    with torch.no_grad():
        found = model(input_ids=WINDOWS[0][None]).logits
    # INT8 activations are all that differs
    expected = Llama(checkpoint, replaced).logits(WINDOWS[0][None])
    error = (found - expected).square().mean() / expected.square().mean()
    assert 0 < error < 1e-3


def test_head_stays_unless_asked_for(model):
    assert type(model.lm_head) is nn.Linear
    assert "lm_head" not in quantize_model(model, group=GROUP)
    assert type(model.lm_head) is nn.Linear
    assert quantize_model(model, group=GROUP, skip=()) == ["lm_head"]


def test_model_without_linear_layers_is_refused(model):
    with pytest.raises(ModelError, match=r"Sequential: no torch\.nn\.Linear to replace beside lm_head"):
        quantize_model(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(TensorError, match=r"moments: none for model\.layers\.0"):
        quantize_model(model, group=GROUP, moments={})


def test_moments_are_those_of_the_inputs(model):
    seen = []
    target = model.model.layers[1].mlp.down_proj
    handle = target.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    found = input_moments(model, WINDOWS, group=GROUP)
    handle.remove()
    expected = sum(second_moment(x, GROUP) for x in seen) / 80
    assert torch.equal(found["model.layers.1.mlp.down_proj"], expected)


def test_tables_are_those_of_the_golden_forward(folder, model):
    calibrator = CacheCalibrator(group=GROUP, sinks=3, statistic="moment")
    for _, observers in observe_layers(open_model(folder), WINDOWS, calibrator.observer):
        calibrator.add(observers)
    expected, found = calibrator.result(), calibrate_cache(model, WINDOWS, group=GROUP, sinks=3)
    assert (found.group, found.sinks, set(found.tables)) == (GROUP, 3, set(expected.tables))
    for name in ("key_mean", "key_floor", "value_floor"):
        # forwards that sum in another order: a last bit of fp16 here and there
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=2e-3, atol=2e-3)
    with pytest.raises(ModelError, match="calibration text: no tokens"):
        calibrate_cache(model, [])


def imported(folder: Path) -> str:
    """Last line of what importing says where *folder* holds the first transformers that Python finds."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import kvant.golden.models.huggingface"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return run.stderr.strip().splitlines()[-1] if run.returncode else ""


def test_import_stops_at_an_old_transformers(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.57.6'\n")
    text = "ImportError: transformers 4.57.6: transformers 5.0 or newer is needed (pip install 'kvant[llm]')"
    assert imported(tmp_path) == text


def test_import_stops_without_transformers():
    code = (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest); "
        "import kvant.golden.models.llama; import kvant.golden.models.huggingface"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert (
        last
        == "ImportError: transformers: not installed; transformers 5.0 or newer is needed (pip install 'kvant[llm]')"
    )


def test_oldest_release_is_the_one_declared():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (declared,) = (r for r in map(Requirement, project["optional-dependencies"]["llm"]) if r.name == "transformers")
    assert str(declared.specifier) == f">={huggingface.OLDEST}"
