"""Configuration: layers, presets, overrides, and refusals of one line."""

import pytest

from kvant import config
from kvant.errors import InputError

PAPER = (0, 5, 10, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 100, 120)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "design.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path=None, *overrides):
    with pytest.raises(InputError) as caught:
        config.load(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_default_is_8_by_8_lanes_with_groups_of_64():
    default = config.load()
    assert (default.preset, default.linear.rows, default.linear.cols, default.linear.group) == ("default", 8, 8, 64)
    assert (default.pq.recent, default.cache.sinks, default.cache.port_bits) == (0, 0, 128)


def test_default_table_and_thresholds_are_those_of_the_golden_model():
    codes = pytest.importorskip("kvant.golden.numeric.codes")
    default = config.load()
    assert default.coefficients == tuple(codes.DEFAULT_COEFFICIENTS)
    assert default.thresholds == tuple(codes.DEFAULT_THRESHOLDS)


@pytest.mark.parametrize("name", config.presets())
def test_every_preset_is_legal(name):
    preset = config.load(name)
    assert preset.preset == name
    assert 1 <= len(preset.coefficients) <= 16


def test_paper_preset_has_the_coefficients_of_the_article_and_no_thresholds():
    paper = config.load("paper")
    assert paper.coefficients == PAPER
    assert paper.thresholds is None


def test_paper_preset_takes_thresholds():
    thresholds = list(range(100, 1600, 100))
    assert config.load("paper", [f"thresholds={thresholds}"]).thresholds == tuple(thresholds)


def test_file_overrides_its_preset_and_override_wins_over_the_file(toml):
    path = toml('preset = "paper"\nrows = 4\ncols = 2\n')
    loaded = config.load(path, ["cols=3", "cols=5"])
    assert (loaded.preset, loaded.linear.rows, loaded.linear.cols) == ("paper", 4, 5)
    assert loaded.coefficients == PAPER


def test_preset_can_be_overridden():
    assert config.load(None, ["preset=paper"]).coefficients == PAPER


def test_bare_word_is_a_string_and_other_values_are_toml():
    loaded = config.load(None, ["adder=kogge_stone", "int8_groups=false", "coefficients=[0, 255]", "thresholds = [7]"])
    assert (loaded.linear.adder, loaded.linear.int8_groups) == ("kogge_stone", False)
    assert (loaded.coefficients, loaded.thresholds) == ((0, 255), (7,))


def test_none_clears_an_optional_field(toml):
    assert config.load(toml("quant_lanes = 4"), ["quant_lanes=none"]).linear.quant_lanes is None


def test_coefficients_without_thresholds_do_not_inherit_those_of_another_table():
    assert config.load(None, ["coefficients=[5, 255]"]).thresholds is None


def test_table_of_one_coefficient_has_no_threshold():
    loaded = config.load(None, ["coefficients=[255]", "thresholds=[]"])
    assert (loaded.coefficients, loaded.thresholds) == ((255,), ())


def test_repeated_and_unordered_coefficients_are_legal():
    assert config.load(None, ["coefficients=[120, 5, 5, 255, 0]"]).coefficients == (120, 5, 5, 255, 0)


def test_equal_thresholds_are_legal():
    assert config.load(None, ["coefficients=[1, 2, 3]", "thresholds=[65535, 65535]"]).thresholds == (65535, 65535)


def test_as_dict_composes_to_the_same_configuration():
    loaded = config.load("paper", ["rows=3", "group=96"])
    values = {name: value for name, value in loaded.as_dict().items() if value is not None}
    assert config.compose([("again", values)]) == loaded


@pytest.mark.parametrize(
    "value", ["0", "-1", "65", "8.0", "'8'", "true", "nan", "[8]", "{}", "1e3", "99999999999999999999", "eight"]
)
@pytest.mark.parametrize("field", ["rows", "cols"])
def test_case_33_wrong_value_is_refused_with_field_value_and_legal_range(field, value):
    text = refusal(None, f"{field}={value}")
    assert text.startswith(f"--set: {field} = ")
    assert text.endswith("legal is an integer from 1 to 64")


@pytest.mark.parametrize(
    ("override", "legal"),
    [
        ("group=0", "an integer from 1 to 256"),
        ("max_coefficient=128", "an integer from 0 to 127"),
        ("recent=-1", "an integer from 0 to 65536"),
        ("sinks=4.0", "an integer from 0 to 256"),
        ("nbits=9", "an integer from 4 to 8"),
        ("subspace=3", "one of 1, 2, 4, 8"),
        ("subspace=true", "one of 1, 2, 4, 8"),
        ("port_bits=100", "one of 32, 64, 128, 256, 512"),
        ("statistic=mean", "one of 'variance', 'moment'"),
        ("int8_groups=1", "true or false"),
        ("multiplier=booth", "one of 'lut', 'dsp', 'ecp5_dsp'"),
        ("quant_lanes=3", "the divisors of rows = 8: [1, 2, 4, 8]"),
        ("capacity=100", "the multiples of group = 64"),
        ("activation_words=4", "an integer from 8"),
        ("coefficients=[]", "1 to 16 integers"),
        ("coefficients=[0, 128]", "from 0 to max_coefficient = 127, or 255"),
        ("coefficients=[254]", "from 0 to max_coefficient = 127, or 255"),
        ("coefficients=[-1]", "from 0 to max_coefficient = 127, or 255"),
        ("coefficients=[1.0]", "1 to 16 integers"),
        ("coefficients=[true]", "1 to 16 integers"),
        (f"coefficients={[1] * 17}", "1 to 16 integers"),
        ("coefficients=5", "1 to 16 integers"),
        ("thresholds=[1, 2]", "15, one fewer than the 16 coefficients"),
        (f"thresholds={[9, *range(14)]}", "from 9 (the one before it) to 65535"),
        (f"thresholds={[*range(14), 65536]}", "to 65535"),
        (f"thresholds={[-1, *range(14)]}", "from 0 to 65535"),
        ("preset=nonsense", "one of default,"),
        ("preset=3", "one of default,"),
    ],
)
def test_refusal_names_field_and_legal_range(override, legal):
    text = refusal(None, override)
    assert override.partition("=")[0] in text
    assert legal in text


def test_table_beyond_a_smaller_max_coefficient_is_refused_when_given():
    assert "coefficients[1] = 100" in refusal(None, "coefficients=[5, 100]", "max_coefficient=60")


def test_table_of_a_preset_beyond_a_smaller_max_coefficient_is_refused_when_used():
    smaller = config.load(None, ["max_coefficient=60"])
    with pytest.raises(InputError, match=r"coefficients\[11\] = 70: .* max_coefficient = 60"):
        _ = smaller.coefficients


def test_unknown_field_is_refused_with_the_nearest_name():
    text = refusal(None, "rwos=8")
    assert "rwos = 8" in text and "did you mean rows?" in text


@pytest.mark.parametrize("override", ["rows", "=8", "rows=", "rows=[8", "rows=1\nx=2", "rows=" + "9" * 5000, ""])
def test_malformed_override_is_refused(override):
    assert refusal(None, override).startswith("--set")


def test_error_in_a_file_names_the_file(toml):
    path = toml("rows = 0\n")
    assert refusal(path) == f"{path}: rows = 0: legal is an integer from 1 to 64"


@pytest.mark.parametrize("text", ["rows = ", "rows 8", "[rows\n", "rows = 8\nrows = 8\n"])
def test_file_that_is_not_toml_is_refused(toml, text):
    assert "not TOML" in refusal(toml(text))


def test_table_in_a_file_is_an_unknown_field(toml):
    assert "linear" in refusal(toml("[linear]\nrows = 8\n"))


def test_missing_file_is_refused_with_the_presets(tmp_path):
    text = refusal(tmp_path / "absent.toml")
    assert "no such file" in text and "paper" in text


def test_directory_and_binary_file_are_refused(tmp_path):
    assert "directory" in refusal(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)))
    assert "UTF-8" in refusal(binary)
