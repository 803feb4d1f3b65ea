"""GPTQ and AWQ packing, against packers written from the formats' descriptions, element by element."""

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import write_folder

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""Column of an AWQ word's nibble j, least significant nibble first."""


def word(fields: list[int], bits: int) -> int:
    """An int32 of unsigned fields, the first in the low bits."""
    value = sum(field << (bits * place) for place, field in enumerate(fields))
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_gptq(q, zeros, bits: int, zero_offset: int = 1):
    """q [K, N], zeros [K/g, N] integers to qweight [K*bits/32, N] and qzeros [K/g, N*bits/32]."""
    inputs, outputs = q.shape
    per_word = 32 // bits
    qweight = [
        [word([int(q[row + i, n]) for i in range(per_word)], bits) for n in range(outputs)]
        for row in range(0, inputs, per_word)
    ]
    qzeros = [
        [word([int(line[n + i]) - zero_offset for i in range(per_word)], bits) for n in range(0, outputs, per_word)]
        for line in zeros
    ]
    return torch.tensor(qweight, dtype=torch.int32), torch.tensor(qzeros, dtype=torch.int32)


def pack_awq(matrix):
    """Integers [rows, N] to int32 [rows, N/8]."""
    return torch.tensor(
        [[word([int(row[n + column]) for column in AWQ_COLUMNS], 4) for n in range(0, len(row), 8)] for row in matrix],
        dtype=torch.int32,
    )


def random_matrix(inputs: int, outputs: int, group: int, bits: int):
    random = torch.Generator().manual_seed(inputs + outputs + bits)
    q = torch.randint(0, 1 << bits, (inputs, outputs), generator=random)
    zeros = torch.randint(1, 1 << bits, (inputs // group, outputs), generator=random)
    scales = (0.01 + torch.rand(inputs // group, outputs, generator=random)).half()
    return q, zeros, scales


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
