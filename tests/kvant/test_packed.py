"""The file of quantised weights: what comes back, what is refused, what its bytes are."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvant import packed
from kvant.errors import InputError
from kvant.golden.linear.search import quantize_weights

CONFIGURATION = {"group": 32, "objective": "weight"}
SOURCE = {"name": "m.safetensors", "sha256": "0" * 64}


def weights(outputs: int, inputs: int, group: int = 32, **options):
    random = torch.Generator().manual_seed(outputs * inputs)
    w = torch.randn(outputs, inputs, generator=random)
    w[0, 0] = 20.0  # an outlier for the INT8 option
    return quantize_weights(w, group, **options)


@pytest.fixture
def file(tmp_path):
    """A file with an even and an odd number of inputs, a short last group and INT8 groups."""
    path = tmp_path / "packed.safetensors"
    tensors = {"a.weight": weights(6, 64), "b.weight": weights(3, 45), "c.weight": weights(4, 70, outlier_groups=3.5)}
    packed.save(path, tensors, CONFIGURATION, SOURCE)
    return path, tensors


def rewrite(path, change):
    """Change the tensors or the description of a file, as another program would."""
    planes = load_file(path)
    with safe_open(path, framework="pt") as handle:
        header = json.loads(handle.metadata()["kvant"])
    change(planes, header)
    header.pop("sha256", None)
    header["sha256"] = packed._header_digest(header)
    save_file(planes, path, {"kvant": json.dumps(header)})


def refusal(path) -> str:
    with pytest.raises(InputError) as caught:
        packed.load(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


def test_everything_comes_back(file):
    path, tensors = file
    model = packed.load(path)
    assert model.configuration == CONFIGURATION and model.source == SOURCE
    assert list(model.tensors) == list(tensors)
    for name, expected in tensors.items():
        found = model.tensors[name]
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.coefficient, expected.coefficient)
        assert torch.equal(found.dequantize(), expected.dequantize())
        assert (found.group, found.loss) == (expected.group, expected.loss)
    assert model.tensors["a.weight"].int8 is None
    assert torch.equal(model.tensors["c.weight"].int8, tensors["c.weight"].int8)


def test_same_weights_give_the_same_bytes(file, tmp_path):
    path, tensors = file
    packed.save(tmp_path / "again.safetensors", tensors, CONFIGURATION, SOURCE)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_case_18_codes_take_four_bits_and_reported_bytes_are_those_of_the_tensors(file):
    path, _ = file
    model = packed.load(path)
    stored = load_file(path)
    assert sum(model.bytes.values()) == sum(plane.nbytes for plane in stored.values())
    assert model.bytes["codes"] == 6 * 32 + 3 * 23 + 4 * 35
    assert model.bytes["scale"] == 2 * (6 * 2 + 3 * 2 + 4 * 3) == 2 * model.bytes["coefficient"]
    marked = int((model.tensors["c.weight"].coefficient == 254).sum())
    assert marked > 0
    assert model.bytes["int8"] == 32 * marked


@pytest.mark.parametrize("part", ["codes", "scale", "coefficient", "int8"])
def test_case_18_a_missing_part_is_refused_by_name(file, part):
    path, _ = file
    rewrite(path, lambda planes, header: planes.pop(f"c.weight.{part}"))
    assert f"c.weight.{part} is missing" in refusal(path)


@pytest.mark.parametrize("part", ["scale", "int8"])
def test_case_18_a_part_missing_from_the_description_too_is_refused(file, part):
    path, _ = file

    def change(planes, header):
        del planes[f"c.weight.{part}"], header["tensors"]["c.weight"]["sha256"][part]

    rewrite(path, change)
    assert f"c.weight.{part} is missing" in refusal(path)


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(file, length):
    path, _ = file
    path.write_bytes(path.read_bytes()[:length])
    assert "truncated" in refusal(path)


def test_every_damaged_byte_is_noticed(file):
    path, _ = file
    data = path.read_bytes()
    for place in [*range(0, len(data), 41), len(data) - 1]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        refusal(path)


def test_another_version_is_refused_with_both_numbers(file):
    path, _ = file
    rewrite(path, lambda planes, header: header.update(version=99))
    assert "version 99; this program reads version 1" in refusal(path)


def test_another_format_is_refused(file):
    path, _ = file
    rewrite(path, lambda planes, header: header.update(format="other"))
    assert "'other'" in refusal(path)


def test_a_safetensors_file_of_another_program_is_refused(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    assert "kvant quantize" in refusal(tmp_path / "m.safetensors")


def test_a_missing_file_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.safetensors")


def damage(part, value):
    """Replace a part and its digest consistently: only its meaning is wrong."""

    def change(planes, header):
        planes[f"a.weight.{part}"] = value(planes[f"a.weight.{part}"])
        header["tensors"]["a.weight"]["sha256"][part] = packed._digest(planes[f"a.weight.{part}"])

    return change


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("codes", lambda t: t[:, :-1].contiguous(), "a.weight.codes: shape (6, 31)"),
        ("scale", lambda t: t[:-1].contiguous(), "shape (5, 2)"),
        ("coefficient", lambda t: t[:, :1].contiguous(), "a.weight.coefficient: shape (6, 1)"),
        ("scale", lambda t: t.float(), "has type F32; legal is F16"),
        ("scale", lambda t: -t, "legal is a finite value of at least 0"),
        ("scale", lambda t: t * torch.inf, "legal is a finite value of at least 0"),
        ("coefficient", lambda t: t.fill_(200), "legal is 0 to 127"),
        ("coefficient", lambda t: t.fill_(254), "a.weight.int8 is missing"),
    ],
)
def test_parts_that_mean_nothing_are_refused(file, part, value, words):
    path, _ = file
    rewrite(path, damage(part, value))
    assert words in refusal(path)


def test_side_plane_without_int8_group_is_refused(file):
    path, _ = file

    def change(planes, header):
        planes["a.weight.int8"] = torch.zeros(1, 32, dtype=torch.int8)
        header["tensors"]["a.weight"]["sha256"]["int8"] = packed._digest(planes["a.weight.int8"])

    rewrite(path, change)
    assert "a.weight.int8" in refusal(path)


def test_a_tensor_that_belongs_to_nothing_is_refused(file):
    path, _ = file
    rewrite(path, lambda planes, header: planes.update({"d.weight.codes": torch.zeros(1, dtype=torch.uint8)}))
    assert "d.weight.codes belongs to no weight" in refusal(path)


def test_a_failed_write_leaves_the_former_file_and_nothing_else(file, monkeypatch):
    import safetensors.torch

    path, tensors = file
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        packed.save(path, tensors, {}, {})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_weights_of_another_model_are_refused(tmp_path):
    from kvant.golden.models.checkpoint import open_model

    random = torch.Generator().manual_seed(1)
    w = {"a.weight": torch.randn(4, 32, generator=random)}
    save_file(w, tmp_path / "m.safetensors")
    checkpoint = open_model(tmp_path / "m.safetensors")
    source = {"name": "m.safetensors", "sha256": checkpoint.sha256()}
    packed.save(tmp_path / "p.safetensors", {"a.weight": quantize_weights(w["a.weight"], 32)}, {}, source)
    model = packed.load(tmp_path / "p.safetensors")
    model.check_source(checkpoint)
    save_file({"a.weight": w["a.weight"] + 1}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"other\.safetensors: SHA-256"):
        model.check_source(open_model(tmp_path / "other.safetensors"))
    save_file({"a.weight": torch.ones(4, 33)}, tmp_path / "wider.safetensors")
    with pytest.raises(InputError, match=r"a\.weight: packed as \[4, 32\]"):
        model.check_source(open_model(tmp_path / "wider.safetensors"))


@pytest.fixture
def cache_file(tmp_path):
    """A file with tables of caches of two layers, and no weights."""
    from kvant.golden.kvcache.calibration import CacheTables
    from kvant.golden.kvcache.choice import Tables

    random = torch.Generator().manual_seed(3)
    vectors = [torch.rand(2, 3, 8, generator=random).half() for _ in range(3)]
    tables = {
        "key_time": Tables.of([[5, 255], [20, 0]], [[700], [65535]], "moment"),
        "value_time": Tables.of([[1], [2]], [[], []], "variance"),
    }
    cache = CacheTables(64, 4, *vectors, tables=tables)
    path = tmp_path / "caches.safetensors"
    packed.save(path, {}, CONFIGURATION, SOURCE, cache)
    return path, cache


def test_tables_of_caches_come_back(cache_file):
    path, cache = cache_file
    found = packed.load(path).cache
    assert (found.group, found.sinks, list(found.tables)) == (64, 4, ["key_time", "value_time"])
    for name in ("key_mean", "key_floor", "value_floor"):
        assert torch.equal(getattr(found, name), getattr(cache, name))
    for kind, tables in cache.tables.items():
        assert torch.equal(found.tables[kind].coefficients, tables.coefficients)
        assert torch.equal(found.tables[kind].thresholds, tables.thresholds)
        assert found.tables[kind].statistic == tables.statistic
    assert load_file(path)["cache.key_time.thresholds"].dtype == torch.uint16


def test_file_without_tables_of_caches_has_none(file):
    assert packed.load(file[0]).cache is None


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda planes, header: planes.pop("cache.key_floor"), "cache.key_floor is missing"),
        (lambda planes, header: planes["cache.key_mean"].add_(1), "cache.key_mean is damaged"),
        (lambda planes, header: header["cache"]["sha256"].pop("value_floor"), "cache.value_floor is missing"),
        (lambda planes, header: header["cache"]["statistic"].update(key_time="x"), "statistic = 'x'"),
        (
            lambda planes, header: planes.update({"cache.value_floor": planes["cache.value_floor"].float()}),
            "cache.value_floor has type F32; legal is F16",
        ),
    ],
)
def test_damaged_tables_of_caches_are_refused(cache_file, change, text):
    path, _ = cache_file
    rewrite(path, change)
    assert text in refusal(path)


def test_case_18_floor_below_zero_is_refused(cache_file):
    path, cache = cache_file
    cache.value_floor[0, 0, 0] = -1
    packed.save(path, {}, CONFIGURATION, SOURCE, cache)
    assert "cache.value_floor: legal are finite values, in a floor of at least 0" in refusal(path)


@pytest.fixture
def mapped_file(cache_file):
    """The same with maps ahead of the caches."""
    from dataclasses import replace

    path, cache = cache_file
    maps = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).half() for seed in (5, 6)]
    cache = replace(cache, key_map=maps[0], value_map=maps[1])
    packed.save(path, {}, CONFIGURATION, SOURCE, cache)
    return path, cache


def test_maps_ahead_of_caches_come_back(mapped_file, cache_file):
    path, cache = mapped_file
    found = packed.load(path).cache
    assert torch.equal(found.key_map, cache.key_map) and torch.equal(found.value_map, cache.value_map)
    packed.save(path, {}, CONFIGURATION, SOURCE, cache_file[1])
    assert packed.load(path).cache.key_map is None


def without_value_map(planes, header):
    planes.pop("cache.value_map")
    header["cache"]["sha256"].pop("value_map")


@pytest.mark.parametrize(
    "change, text",
    [
        (without_value_map, "cache: key_map without the other map; legal are both or none"),
        (lambda planes, header: planes["cache.key_map"].add_(1), "cache.key_map is damaged"),
    ],
)
def test_damaged_maps_are_refused(mapped_file, change, text):
    path, _ = mapped_file
    rewrite(path, change)
    assert text in refusal(path)


@pytest.mark.parametrize("value", [0.0, torch.inf])
def test_maps_without_inverse_are_refused(mapped_file, value):
    path, cache = mapped_file
    cache.key_map[1, 2] = value
    packed.save(path, {}, CONFIGURATION, SOURCE, cache)
    assert "cache.key_map: legal are finite values that can be inverted" in refusal(path)
