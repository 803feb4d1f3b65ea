"""``kvant simulate``: a user's tensors in, the RTL's tensors out, bad input refused in one line."""

import io
import zipfile

import numpy as np
import pytest

from kvant import config
from kvant.errors import InputError
from kvant.linear import BLOCK, golden_outputs, random_case
from kvant.tensors import read_npz

SMALL = ("rows=4", "cols=2", "group=8")

DTYPES = {
    "y": "float32",
    "x_q": "int8",
    "x_scale": "float16",
    "w_codes": "uint8",
    "w_scale": "float16",
    "w_coeff": "uint8",
    "cycles": "int64",
    "busy_cycles": "int64",
    "nonfinite": "int64",
    "error": "int64",
    "group": "int64",
    "rows": "int64",
    "cols": "int64",
    "lanes": "int64",
}


@pytest.fixture
def case():
    return random_case(config.load(None, SMALL), tokens=2, outputs=3, inputs=13, seed=1)


@pytest.fixture
def simulate(kvant, tmp_path):
    """Run ``kvant simulate linear`` on arrays; returns the finished program and the output file."""

    def run(arrays, *options, overrides=SMALL, simulator="amaranth"):
        source, target = tmp_path / "in.npz", tmp_path / "out.npz"
        np.savez(source, **arrays)
        settings = [text for override in overrides for text in ("--set", override)]
        where = ("--data", source, "--out", target, "--simulator", simulator)
        return kvant("simulate", "linear", *where, *settings, *options), target

    return run


def test_quantised_weights_give_every_documented_array_and_the_golden_outputs(simulate, case):
    result, target = simulate(case)
    assert result.returncode == 0, result.stderr
    with np.load(target) as archive:
        out = {name: archive[name] for name in archive.files}
    assert {name: str(array.dtype) for name, array in out.items()} == DTYPES | {"w_int8": "int8"}
    golden = golden_outputs(config.load(None, SMALL).linear, case)
    assert out["y"].tobytes() == golden["y"].tobytes() and out["x_q"].tobytes() == golden["x_q"].tobytes()
    assert (out["group"], out["rows"], out["cols"], out["lanes"]) == (8, 4, 2, 8)
    assert out["cycles"] > out["busy_cycles"] > 0


def test_fp32_weights_are_quantised_by_least_weight_error(simulate, case):
    rng = np.random.default_rng(3)
    arrays = {"x": case["x"], "w": rng.standard_normal((3, 13)).astype(np.float32)}
    result, target = simulate(arrays)
    assert result.returncode == 0, result.stderr
    with np.load(target) as archive:
        assert {name: str(archive[name].dtype) for name in archive.files} == DTYPES
        from kvant.golden.linear.search import quantize_weights

        quantised = quantize_weights(arrays["w"], 8, config.load(None, SMALL).coefficients)
        assert np.array_equal(archive["w_codes"], quantised.codes.numpy())
        assert np.array_equal(archive["w_coeff"], quantised.coefficient.numpy())


def test_group_among_the_arrays_replaces_the_configuration(simulate):
    arrays = random_case(config.load(None, ["group=16"]), tokens=1, outputs=2, inputs=20, seed=1)
    result, target = simulate(arrays | {"group": np.array(16, np.int32)})
    assert result.returncode == 0, result.stderr
    with np.load(target) as archive:
        assert archive["group"] == 16 and archive["x_scale"].shape == (1, 2)


def test_case_18_a_field_without_effect_is_named(simulate, case):
    result, _ = simulate(case, overrides=(*SMALL, "sinks=4"))
    assert result.returncode == 0
    assert "kvant: note: sinks: no effect on linear" in result.stderr.splitlines()
    result, _ = simulate(case)
    assert "note" not in result.stderr


def test_stalls_change_nothing_but_the_cycles(simulate, case):
    plain, target = simulate(case)
    with np.load(target) as archive:
        before = {name: archive[name] for name in archive.files}
    stalled, target = simulate(case, "--stall", "0.5", "--seed", "7")
    assert plain.returncode == stalled.returncode == 0
    with np.load(target) as archive:
        differing = {name for name in archive.files if not np.array_equal(archive[name], before[name])}
    assert differing == {"cycles"}
    assert "seed 7" in stalled.stderr


def test_waves_lie_beside_the_output(simulate, case):
    result, target = simulate(case, "--waves")
    assert result.returncode == 0, result.stderr
    assert target.with_suffix(".vcd").stat().st_size > 1000


BAD = {
    "unknown array": (lambda a: a | {"foo": a["x"]}, ["foo", "unknown", "w_codes"]),
    "dtype of x": (lambda a: a | {"x": a["x"].astype(np.float32)}, ["x", "float32", "float16 [T, K]"]),
    "no x": (lambda a: {k: v for k, v in a.items() if k != "x"}, ["x", "missing"]),
    "no scales (case 18)": (lambda a: {k: v for k, v in a.items() if k != "w_scale"}, ["w_scale", "missing"]),
    "no weights": (lambda a: {"x": a["x"]}, ["w_codes", "missing"]),
    "other K": (lambda a: a | {"w_codes": a["w_codes"][:, :-1]}, ["w_codes", "K = 13"]),
    "other number of groups": (lambda a: a | {"w_scale": a["w_scale"][:, :1]}, ["w_scale", "ceil(13 / 8) = 2"]),
    "zero tokens": (lambda a: a | {"x": a["x"][:0]}, ["x", "zero"]),
    "code above 15": (lambda a: a | {"w_codes": a["w_codes"] | 16}, ["w_codes"]),
    "reserved coefficient": (lambda a: a | {"w_coeff": a["w_coeff"] * 0 + 130}, ["w_coeff", "130"]),
    "negative scale": (lambda a: a | {"w_scale": -a["w_scale"]}, ["w_scale"]),
    "NaN scale": (lambda a: a | {"w_scale": a["w_scale"] * np.float16(np.nan)}, ["w_scale"]),
    "both kinds of weights": (lambda a: a | {"w": a["w_codes"].astype(np.float32)}, ["w_codes", "together with w"]),
    "group of zero": (lambda a: a | {"group": np.array(0)}, ["array: group = 0", "1 to 256"]),
    "group as a vector": (lambda a: a | {"group": np.array([8])}, ["group", "0-d"]),
    "group as a float": (lambda a: a | {"group": np.array(8.0)}, ["group", "float64"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_refused_and_nothing_is_written(name, simulate, case, assert_one_line_error):
    change, words = BAD[name]
    result, target = simulate(change(case))
    assert_one_line_error(result, *words)
    assert not target.exists()


def test_int8_groups_need_their_plane_and_their_datapath(simulate, case, assert_one_line_error):
    case["w_coeff"][0, 0] = 254
    result, _ = simulate({k: v for k, v in case.items() if k != "w_int8"})
    assert_one_line_error(result, "w_int8")
    result, _ = simulate(case, overrides=(*SMALL, "int8_groups=false"))
    assert_one_line_error(result, "int8_groups")


@pytest.mark.parametrize("stall", ["1", "-0.1", "2"])
def test_a_stall_that_is_no_probability_is_refused(stall, simulate, case, assert_one_line_error):
    result, _ = simulate(case, f"--stall={stall}")
    assert_one_line_error(result, "--stall")


def test_a_failed_run_leaves_the_old_output_alone(simulate, case, assert_one_line_error):
    _, target = simulate(case)
    before = target.read_bytes()
    result, target = simulate(case | {"foo": case["x"]})
    assert_one_line_error(result, "foo")
    assert target.read_bytes() == before


def test_inputs_that_do_not_fit_the_buffers_name_the_field_to_turn(simulate, case, assert_one_line_error):
    result, _ = simulate(case, overrides=(*SMALL, "activation_words=3"))
    assert_one_line_error(result, "inputs = 13", "activation_words = 3")


def npy():
    """A small array as a file."""
    file = io.BytesIO()
    np.save(file, np.zeros((4, 16), np.float16))
    return file.getvalue()


def archive_of(content, compression=zipfile.ZIP_STORED):
    """An archive with one member `x.npy`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("x.npy", content)
    return bytearray(file.getvalue())


def damaged(kind):
    """Files that fail to be read in different ways, deep within NumPy."""
    if kind == "damaged compression":
        content = archive_of(npy(), zipfile.ZIP_DEFLATED)
        content[35:45] = b"\xff" * 10  # behind the member's header: a block of a type that there is not
        return content
    if kind == "broken header":
        return archive_of(npy().replace(b"}", b" "))
    if kind == "larger than any memory":
        return archive_of(npy().replace(b"(4, 16), }" + b" " * 16, b"(4, 16%s), }" % (b"0" * 16)))
    if kind == "member that is no array":
        return archive_of(b"text")
    content = archive_of(npy())
    entry = content.index(b"PK\x01\x02")
    if kind == "encrypted":
        content[entry + 8] |= 1
    else:
        content[entry + 10] = content[8] = 99
    return content


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04broken", npy()])
def test_a_file_that_is_no_archive_is_refused(content, kvant, tmp_path, assert_one_line_error):
    source = tmp_path / "in.npz"
    source.write_bytes(content)
    result = kvant("simulate", "linear", "--data", source, "--out", tmp_path / "out.npz")
    assert_one_line_error(result, "in.npz")


@pytest.mark.parametrize(
    "kind",
    [
        "damaged compression",
        "broken header",
        "larger than any memory",
        "member that is no array",
        "encrypted",
        "unknown compression",
    ],
)
def test_a_damaged_archive_is_refused(kind, tmp_path):
    source = tmp_path / "in.npz"
    source.write_bytes(damaged(kind))
    with pytest.raises(InputError, match=r"in\.npz: .*arch") as caught:
        read_npz(source)
    assert "\n" not in str(caught.value)


def test_an_output_that_cannot_be_written_is_refused_before_the_simulation(
    simulate, kvant, case, assert_one_line_error
):
    _, target = simulate(case)
    source = target.with_name("in.npz")
    result = kvant("simulate", "linear", "--data", source, "--out", source / "out.npz", "--set", "rows=4")
    assert_one_line_error(result, "out.npz", "in.npz is a file")


@pytest.mark.parametrize("rows", [2, 8])
def test_case_23_the_order_of_arrays_in_memory_does_not_matter(rows):
    """One group of as many inputs as lanes: nothing on the way copies the arrays."""
    overrides = (f"rows={rows}", "cols=2", "group=8")
    arrays = random_case(config.load(None, overrides), tokens=4, outputs=3, inputs=8, seed=1)
    results = [
        BLOCK.simulate(
            {name: np.array(array, order=order) for name, array in arrays.items()},
            overrides=overrides,
            simulator="amaranth",
        )
        for order in "CF"
    ]
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


def test_unknown_block_and_missing_file_are_refused(kvant, tmp_path, assert_one_line_error):
    result = kvant("simulate", "nothing", "--data", tmp_path / "a.npz", "--out", tmp_path / "out.npz")
    assert_one_line_error(result, "nothing", "linear")
    result = kvant("simulate", "linear", "--data", tmp_path / "a.npz", "--out", tmp_path / "out.npz")
    assert_one_line_error(result, "a.npz", "no such file")


def test_an_override_that_an_array_replaces_does_not_count(kvant, tmp_path):
    """The group of the arrays makes the capacity legal; nothing is refused once the output is written."""
    rng = np.random.default_rng(1)
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, k=rng.standard_normal((3, 16)).astype(np.float16), group=np.array(16))
    settings = ("--set", "capacity=32", "--set", "lanes=4")
    result = kvant("simulate", "kcache", "--data", source, "--out", target, "--simulator", "icarus", *settings)
    assert result.returncode == 0, result.stderr
    with np.load(target) as archive:
        assert int(archive["group"]) == 16


def test_a_negative_seed_is_refused(simulate, case, assert_one_line_error):
    result, target = simulate(case, "--seed", "-1")
    assert_one_line_error(result, "--seed -1", "an integer from 0")
    assert not target.exists()
