"""``kvant model`` and ``kvant quantize`` as a user runs them, on tiny models."""

import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from int4_packers import pack_awq, pack_gptq, random_matrix
from safetensors.torch import load_file, save_file
from tiny_models import CONFIG, random_tensors, write_folder, write_gguf

from kvant import cli, packed
from kvant.commands import quantize as command
from kvant.errors import InputError
from kvant.golden.linear.search import quantize_weights
from kvant.golden.models.checkpoint import open_model

TEXT = "the quick brown fox jumps over the lazy dog, 31 times a day; the other the sleeps. " * 20
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model as a folder."""
    return write_folder(tmp_path_factory.mktemp("model") / "tiny", random_tensors())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(capsys):
    """Run the program in this process, to save its start: gives what was printed, or raises."""

    def call(*arguments) -> str:
        capsys.readouterr()
        cli.build_app()([str(argument) for argument in arguments], standalone_mode=False)
        return capsys.readouterr().out

    return call


@pytest.fixture
def refusal(run):
    """Run the program in this process, be refused with exit code 2, and give the one line it would print."""

    def call(*arguments) -> str:
        with pytest.raises(Exception) as caught:
            run(*arguments)
        assert cli.exit_code(caught.value) == 2
        return cli.one_line(caught.value)

    return call


@pytest.fixture
def quantise(run, tmp_path):
    """Run the command, succeed, and give the file's contents and what was printed."""

    def call(model, *options):
        output = tmp_path / "packed.safetensors"
        printed = run("quantize", model, "-o", output, *options)
        assert [path.name for path in tmp_path.glob("packed*")] == [output.name]
        return packed.load(output), printed

    return call


def test_all_linear_weights_are_quantised_by_weight_error(quantise, model):
    result, printed = quantise(model)
    checkpoint = open_model(model)
    assert list(result.tensors) == [info.name for info in checkpoint.linear_weights]
    for name, weights in result.tensors.items():
        expected = quantize_weights(checkpoint.weight(name), 64, name=name)
        assert torch.equal(weights.codes, expected.codes) and torch.equal(weights.scale, expected.scale)
        assert torch.equal(weights.coefficient, expected.coefficient)
        assert re.search(rf"^{re.escape(name)} +F32 +weight error \d\.\d+e-\d\d$", printed, re.M)
    assert result.configuration["group"] == 64 and result.configuration["objective"] == "weight"
    result.check_source(checkpoint)


def test_case_18_printed_bytes_are_those_of_the_stored_tensors(run, tmp_path, model):
    output = tmp_path / "p.safetensors"
    printed = run("quantize", model, "-o", output, "--outlier-groups", "2.5")
    total = int(re.search(r"^([\d,]+) bytes = ", printed, re.M)[1].replace(",", ""))
    planes = load_file(output)
    assert total == sum(plane.nbytes for plane in planes.values())
    for part in ("codes", "scale", "coefficient", "int8"):
        count = sum(plane.nbytes for name, plane in planes.items() if name.endswith(f".{part}"))
        assert count > 0 and f"{count:,} {part}" in printed


def test_calibration_lowers_the_output_error_and_is_recorded(quantise, model, text):
    options = ("--group", "32", "--calibrate", text, "--tokens", "400", "--window", "100")
    calibrated, printed = quantise(model, *options)
    plain, printed_plain = quantise(model, *options, "--objective", "weight")
    diagonal, printed_diagonal = quantise(model, *options, "--objective", "diagonal")

    def mean(output):
        return float(re.search(r"of the outputs (\S+)$", output, re.M)[1])

    assert mean(printed) < mean(printed_diagonal) < mean(printed_plain)
    recorded = calibrated.configuration["calibration"]
    assert (recorded["text"], recorded["tokens"], recorded["window"]) == ("text.txt", 400, 100)
    assert [r.configuration["objective"] for r in (calibrated, plain, diagonal)] == ["full", "weight", "diagonal"]
    assert not torch.equal(calibrated.tensors[DOWN].codes, plain.tensors[DOWN].codes)


def test_built_in_text_needs_no_file(quantise, model):
    result, _ = quantise(model, "--calibrate", "builtin", "--tokens", "200", "--window", "64", "--only", DOWN)
    assert result.configuration["calibration"]["text"] == "builtin"


def test_two_runs_write_the_same_bytes(run, tmp_path, model, text):
    for name in ("a", "b"):
        run("quantize", model, "-o", tmp_path / name, "--calibrate", text, "--only", DOWN)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_options_and_configuration_set_group_and_table(quantise, model, tmp_path):
    (tmp_path / "own.toml").write_text("group = 16\ncoefficients = [0, 20, 255]\n")
    result, _ = quantise(model, "--config", tmp_path / "own.toml", "--only", DOWN)
    assert result.tensors[DOWN].group == 16
    assert set(result.tensors[DOWN].coefficient.unique().tolist()) <= {0, 20, 255}
    result, _ = quantise(
        model, "--config", tmp_path / "own.toml", "--group", "20", "--coefficients", "7", "--only", DOWN
    )
    assert result.tensors[DOWN].group == 20
    assert result.tensors[DOWN].coefficient.unique().tolist() == [7]


def test_scale_search_lowers_the_weight_error(quantise, model):
    def mean(output):
        return float(re.search(r"error of the weights (\S+)$", output, re.M)[1])

    assert mean(quantise(model, "--scale-search")[1]) < mean(quantise(model)[1])


def test_only_reaches_the_output_projection_when_asked(quantise, tmp_path):
    config = CONFIG | {"tie_word_embeddings": False}
    folder = write_folder(tmp_path / "m", random_tensors(config), config)
    assert "lm_head.weight" not in quantise(folder)[0].tensors
    assert list(quantise(folder, "--only", "lm_head*")[0].tensors) == ["lm_head.weight"]


def test_gguf_weights_come_in_under_the_same_names(quantise, model, tmp_path):
    from_gguf, printed = quantise(write_gguf(tmp_path / "m.gguf", random_tensors()))
    from_folder, _ = quantise(model)
    assert "F32" in printed
    for name, weights in from_folder.tensors.items():
        assert torch.equal(from_gguf.tensors[name].codes, weights.codes)


def test_gptq_and_awq_weights_are_refitted_with_the_loss_printed(quantise, tmp_path):
    q, zeros, scales = random_matrix(64, 32, 32, 4)
    gptq = dict(zip(("g.qweight", "g.qzeros"), pack_gptq(q, zeros, 4), strict=True)) | {"g.scales": scales}
    awq = {"a.qweight": pack_awq(q), "a.qzeros": pack_awq(zeros), "a.scales": scales.clone()}
    save_file(gptq | awq, tmp_path / "m.safetensors")
    result, printed = quantise(tmp_path / "m.safetensors", "--group", "32")
    losses = re.findall(r"^[ag]\.weight +(?:AWQ|GPTQ) 4-bit +weight error (\S+)$", printed, re.M)
    w = open_model(tmp_path / "m.safetensors").weight("a.weight")
    error = w - result.tensors["a.weight"].dequantize()
    relative = float(error.double().square().sum() / w.double().square().sum())
    assert losses == [f"{relative:.3e}"] * 2
    assert 0 < relative < 0.02


def test_weight_that_is_not_finite_is_refused_with_tensor_and_group(kvant, tmp_path, assert_one_line_error):
    w = torch.ones(4, 130)
    w[2, 100] = torch.nan
    save_file({"bad.weight": w}, tmp_path / "m.safetensors")
    result = kvant("quantize", tmp_path / "m.safetensors", "-o", tmp_path / "p.safetensors")
    assert_one_line_error(result, "bad.weight", "[2, 1]")
    assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--calibrate", "{text}", "--weight-error"], ["--calibrate", "--weight-error"]),
        (["--objective", "full"], ["--objective full", "--calibrate"]),
        (["--objective", "best"], ["best", "full", "diagonal", "weight"]),
        (["--calibrate", "nowhere.txt"], ["nowhere.txt", "builtin"]),
        (["--group", "0"], ["group = 0", "1 to 256"]),
        (["--coefficients", "5,128"], ["128"]),
        (["--coefficients", ""], ["coefficients"]),
        (["--outlier-groups", "0"], ["--outlier-groups = 0"]),
        (["--only", "*.nothing"], ["*.nothing", "down_proj"]),
        (["--calibrate", "{text}", "--window", "129"], ["window = 129", "2 to 128"]),
        (["--tokens", "1"], ["--tokens"]),
    ],
)
def test_bad_options_are_refused_in_one_line(refusal, tmp_path, model, text, options, words):
    options = [option.format(text=text) for option in options]
    line = refusal("quantize", model, "-o", tmp_path / "p.safetensors", *options)
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_is_refused_before_the_work(refusal, tmp_path, model):
    assert "is a folder" in refusal("quantize", model, "-o", tmp_path)
    assert "does not exist" in refusal("quantize", model, "-o", tmp_path / "no" / "p")
    inside = model / "model.safetensors"
    before = inside.read_bytes()
    assert "file of the model itself" in refusal("quantize", model, "-o", inside)
    assert inside.read_bytes() == before


def test_missing_model_is_refused(kvant, tmp_path, assert_one_line_error):
    assert_one_line_error(kvant("quantize", "nothing.gguf", "-o", tmp_path / "p"), "nothing.gguf")


def recipe(**fields) -> command.Recipe:
    return command.Recipe(**{"group": 32, "coefficients": (10, 50, 255)} | fields)


def test_a_resumed_run_reuses_finished_tensors_and_gives_the_same(model, tmp_path):
    checkpoint = open_model(model)
    chosen = checkpoint.linear_weights[:4]
    whole = list(command.quantize_tensors(checkpoint, chosen, recipe()))
    first = command.Workspace(tmp_path / "work", {"job": 1})
    reports = command.quantize_tensors(checkpoint, chosen, recipe(), workspace=first)
    next(reports), next(reports)
    reports.close()  # interrupted after two
    second = list(
        command.quantize_tensors(checkpoint, chosen, recipe(), workspace=command.Workspace(first.folder, {"job": 1}))
    )
    assert [report.resumed for report in second] == [True, True, False, False]
    for resumed, expected in zip(second, whole, strict=True):
        assert torch.equal(resumed.weights.codes, expected.weights.codes)
        assert resumed.weight_loss == expected.weight_loss


def test_another_job_does_not_reuse_finished_tensors(model, tmp_path):
    checkpoint = open_model(model)
    chosen = checkpoint.linear_weights[:1]
    for job in (1, 2):
        workspace = command.Workspace(tmp_path / "work", {"job": job})
        reports = list(command.quantize_tensors(checkpoint, chosen, recipe(), workspace=workspace))
        assert not reports[0].resumed


def test_a_damaged_finished_tensor_is_made_anew(model, tmp_path):
    checkpoint = open_model(model)
    chosen = checkpoint.linear_weights[:1]
    workspace = command.Workspace(tmp_path / "work", {})
    list(command.quantize_tensors(checkpoint, chosen, recipe(), workspace=workspace))
    data = workspace.path(0).read_bytes()
    workspace.path(0).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert not next(command.quantize_tensors(checkpoint, chosen, recipe(), workspace=workspace)).resumed


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupted_command_keeps_its_work_and_leaves_no_output(tmp_path, model):
    output = tmp_path / "p.safetensors"
    arguments = [sys.executable, "-m", "kvant", "quantize", str(model), "-o", str(output)]
    work = tmp_path / "p.safetensors.partial"
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (work / "00000.safetensors").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    if process.returncode == 0:  # it was faster than the signal
        pytest.skip("finished before the interrupt")
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not output.exists() and (work / "00000.safetensors").exists()
    again = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "(resumed)" in again.stdout
    assert output.exists() and not work.exists()


def test_calibration_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match="not UTF-8 at byte 3"):
        command.calibration_text(str(tmp_path / "t.txt"))


def test_model_show_lists_shape_and_tensors(run, model):
    printed = run("model", "show", model)
    assert "layers 2  hidden 48  heads 6  kv_heads 2" in printed
    assert "14 linear weights" in printed and "tied to the embedding" in printed
    assert re.search(rf"^{re.escape(DOWN)} +linear +F32 +\[48, 80\]$", printed, re.M)
    assert DOWN not in run("model", "show", model, "--no-tensors")


def test_model_list_says_what_is_fetched(run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path))
    assert "not fetched: kvant model fetch smollm2" in run("model", "list")


def test_model_fetch_of_an_unknown_name_is_refused(refusal):
    line = refusal("model", "fetch", "gpt9")
    assert "gpt9" in line and "smollm2" in line


def test_calibration_fits_the_tables_of_the_caches(quantise, model, text):
    options = ("--calibrate", text, "--tokens", "400", "--window", "100", "--group", "16", "--sinks", "2")
    result, printed = quantise(model, *options, "--only", DOWN)
    assert result.cache.group == 16 and result.cache.sinks == 2
    assert result.cache.key_mean.shape == (
        CONFIG["num_hidden_layers"],
        CONFIG["num_key_value_heads"],
        CONFIG["head_dim"],
    )
    assert "tables for the caches of 2 layers: key_head, key_time, value_time, value_time_offset" in printed
    alone, printed = quantise(model, *options, "--cache-only", "--set", "statistic=moment")
    assert not alone.tensors and "weights" not in printed
    assert torch.equal(alone.cache.value_floor, result.cache.value_floor)
    assert {tables.statistic for tables in alone.cache.tables.values()} == {"moment"}
    assert (alone.configuration["sinks"], alone.configuration["statistic"]) == (2, "moment")
    alone.check_source(open_model(model))


def test_calibration_windows_without_a_group_leave_the_caches_out(quantise, refusal, model, text, tmp_path):
    options = ("--calibrate", text, "--tokens", "200", "--window", "50", "--group", "64")
    result, printed = quantise(model, *options, "--only", DOWN)
    assert result.cache is None and "no tables for caches: no calibration window holds a group of 64 tokens" in printed
    line = refusal("quantize", model, "-o", tmp_path / "x.safetensors", *options, "--cache-only")
    assert line.startswith("calibration windows of 50 tokens: legal is at least group = 64")


def test_tables_alone_need_a_text(refusal, model, tmp_path):
    line = refusal("quantize", model, "-o", tmp_path / "x.safetensors", "--cache-only")
    assert line == "--cache-only: needs --calibrate TEXT, and takes no --only"
