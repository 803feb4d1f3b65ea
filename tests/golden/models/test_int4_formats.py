"""GPTQ and AWQ packing, against packers written from the formats' descriptions, element by element."""

import pytest
import torch
from int4_packers import pack_awq, pack_gptq, random_matrix
from safetensors.torch import save_file
from tiny_models import write_folder

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError


def expected(q, zeros, scales, group_of_input):
    rows = [scales[g].float() * (q[k] - zeros[g]) for k, g in enumerate(group_of_input)]
    return torch.stack(rows).T


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_is_dequantised(tmp_path, bits):
    q, zeros, scales = random_matrix(64, 32, 32, bits)
    qweight, qzeros = pack_gptq(q, zeros, bits)
    save_file({"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}, tmp_path / "m.safetensors")
    checkpoint = open_model(tmp_path / "m.safetensors")
    info = checkpoint.tensors["a.weight"]
    assert (info.shape, info.stored, info.role) == ((32, 64), f"GPTQ {bits}-bit", "linear")
    assert list(checkpoint.tensors) == ["a.weight"]
    assert torch.equal(checkpoint.weight("a.weight"), expected(q, zeros, scales, [k // 32 for k in range(64)]))


def test_gptq_group_index_permutes_the_groups(tmp_path):
    q, zeros, scales = random_matrix(64, 16, 32, 4)
    qweight, qzeros = pack_gptq(q, zeros, 4)
    index = (torch.arange(64) * 5 % 64 >= 32).int()
    parts = {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales, "a.g_idx": index}
    save_file(parts, tmp_path / "m.safetensors")
    w = open_model(tmp_path / "m.safetensors").weight("a.weight")
    assert torch.equal(w, expected(q, zeros, scales, index.tolist()))


def test_gptq_version_2_stores_zero_points_as_they_are(tmp_path):
    q, zeros, scales = random_matrix(32, 16, 16, 4)
    qweight, qzeros = pack_gptq(q, zeros, 4, zero_offset=0)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}}
    write_folder(tmp_path, {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}, config)
    w = open_model(tmp_path).weight("a.weight")
    assert torch.equal(w, expected(q, zeros, scales, [k // 16 for k in range(32)]))


def test_awq_is_dequantised_in_its_nibble_order(tmp_path):
    q, zeros, scales = random_matrix(48, 32, 16, 4)
    parts = {"a.qweight": pack_awq(q), "a.qzeros": pack_awq(zeros), "a.scales": scales}
    save_file(parts, tmp_path / "m.safetensors")
    checkpoint = open_model(tmp_path / "m.safetensors")
    assert checkpoint.tensors["a.weight"].stored == "AWQ 4-bit"
    assert torch.equal(checkpoint.weight("a.weight"), expected(q, zeros, scales, [k // 16 for k in range(48)]))


def test_a_missing_part_is_named(tmp_path):
    q, zeros, _ = random_matrix(32, 16, 16, 4)
    qweight, qzeros = pack_gptq(q, zeros, 4)
    save_file({"a.qweight": qweight, "a.qzeros": qzeros}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match=r"a\.scales: missing"):
        open_model(tmp_path / "m.safetensors")


def test_a_packing_of_neither_format_is_refused(tmp_path):
    parts = {
        "a.qweight": torch.zeros(6, 16, dtype=torch.int32),
        "a.qzeros": torch.zeros(2, 3, dtype=torch.int32),
        "a.scales": torch.ones(2, 32).half(),
    }
    save_file(parts, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="neither GPTQ"):
        open_model(tmp_path / "m.safetensors")


def test_a_group_index_out_of_range_is_refused(tmp_path):
    q, zeros, scales = random_matrix(32, 16, 16, 4)
    qweight, qzeros = pack_gptq(q, zeros, 4)
    parts = {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales, "a.g_idx": torch.full((32,), 2).int()}
    save_file(parts, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="legal is 0 to 1"):
        open_model(tmp_path / "m.safetensors").weight("a.weight")
