"""`mxsim inspect`: what it prints, and that the JSON has every digit."""

import json
import math
from fractions import Fraction

import pytest
from typer.testing import CliRunner

from mxsim.blocks import BLOCK_FORMATS, quantize
from mxsim.cli import app
from mxsim.formats import FORMATS, Overflow, Rounding, decode, encode


def inspect(*args: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["inspect", *args])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def cells(output: str, title: str, row: str) -> list[str]:
    """The words of one row of the table under a title."""
    lines = output.split(title, 1)[1].splitlines()[1:]
    return next(line.split() for line in lines if line.split()[:1] == [row])


@pytest.mark.parametrize("columns", [80, 100, 140])
@pytest.mark.parametrize(
    "args",
    [["0.1"], ["1/3"], ["-7.0"], ["500"], ["nan"], ["-inf"], ["0"], ["-1e-41"], ["1e300"], ["0x7e"], ["0xffffffff"]],
)
def test_nothing_is_cut_off_or_wider_than_the_terminal(args, columns):
    output = inspect(*args, columns=columns)
    assert "…" not in output
    table_lines = [line for line in output.splitlines() if not line.startswith((args[0], "code"))]
    assert max(map(len, table_lines)) <= columns


def test_a_number_in_e4m3():
    output = inspect("0.3", "--format", "E4M3")
    assert cells(output, "Nearest value", "E4M3")[:7] == ["E4M3", "0x2a", "0", "0101", "010", "0.3125", "4.17"]
    row = cells(output, "Neighbours", "E4M3")
    assert row == ["E4M3", "0.28125", "0.3125", "↑", "↑", "↓", "↑", "↓", "↑", "60", "%", "0.03125"]


def test_scale_rules_at_the_reference_point():
    output = inspect("7", "--format", "MXFP4")
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "MXFP4 FLOOR 2^0 7 0x7 6 14.3 % 6" in rows
    assert "MXFP4 RCEIL CEIL EVEN 2^1 3.5 0x6 8 14.3 % 4" in rows


def test_the_headline_says_what_was_read():
    digits = "0.1000000000000000055511151231257827021181583404541015625"
    assert inspect("0.1").splitlines()[0] == f"0.1 is no float64: read as the nearest, {digits}"
    assert inspect("1.50").splitlines()[0] == "1.50 = 1.5 = 0x1.8p+0"
    assert inspect("1e400").splitlines()[0] == "1e400 is beyond float64: read as inf"
    assert inspect("nan").splitlines()[0] == "nan"


@pytest.mark.parametrize("args", [["-1.5"], ["--", "-1.5"], ["-1.5", "--format", "E2M1"], ["--format", "E2M1", "-1.5"]])
def test_negative_numbers_are_arguments(args):
    assert "1 01 1" in inspect(*args)


@pytest.mark.parametrize("text", ["-inf", "-nan", "-0", "-1e-3", "-0x1.8p3", "-1/3"])
def test_negative_numbers_in_every_spelling(text):
    assert "E4M3" in inspect(text)


def test_a_code_and_a_value_of_the_same_text():
    assert "0 1111 110" in inspect("0x7e", "--format", "e4m3")
    assert "0 1111 110" in inspect("126", "--as", "code", "--format", "E4M3")
    assert cells(inspect("0x7e", "--as", "value", "--format", "E4M3"), "Nearest", "E4M3")[5] == "128"


def test_a_code_too_large_for_some_formats_is_noted():
    output = inspect("0x7e")
    assert "Has 7 bits, too many for a code of E2M1 (4), E2M3 (6), E3M2 (6)." in output
    assert "E2M1 " not in output.split("Has 7 bits")[0]


def test_overflow_modes():
    output = inspect("460", "--format", "E4M3")
    assert cells(output, "Beyond the largest value", "E4M3") == ["E4M3", "448", "448", "448", "448", "nan", "448"]
    assert "Beyond" not in inspect("448", "--format", "E4M3")
    assert "refused" in inspect("7", "--format", "E2M1")


def test_formats_without_a_code_say_so():
    assert cells(inspect("nan"), "Nearest", "E2M1") == ["E2M1", "-", "no", "code", "-", "-"]


def test_naming_a_block_format_brings_its_element_and_the_other_way_round():
    assert [
        line.split()[0]
        for line in inspect("1", "--format", "NVFP4").splitlines()
        if line[:4] in ("E2M1", "NVFP", "MXFP")
    ] == [
        "E2M1",
        "E2M1",
        "NVFP4",
    ]
    output = inspect("1", "--format", "E4M3")
    assert "MXFP8_E4M3" in output
    assert "FP8_1X128" in output
    assert "MXFP4" not in output


# -------------------------------------------------------------------------------------------------------------- JSON
def document(*args: str) -> dict:
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(inspect(*args, "--json"), parse_constant=refuse)


@pytest.mark.parametrize("text", ["0.1", "-7", "500", "1e-40", "-0", "3.4e38"])
def test_json_of_a_number_is_what_the_library_computes(text):
    x = float(text)
    result = document(text)
    assert Fraction(result["value"]) == Fraction(x)
    assert [entry["format"] for entry in result["formats"]] == list(FORMATS)
    for entry in result["formats"]:
        fmt = FORMATS[entry["format"]]
        code = int(encode(x, fmt))
        assert entry["nearest"]["code"] == code
        nearest = float(decode(code, fmt))
        if math.isnan(nearest):
            assert entry["nearest"]["value"] == "nan"
            continue
        assert Fraction(entry["nearest"]["value"]) == Fraction(nearest)
        assert Fraction(entry["error"]) == Fraction(nearest) - Fraction(x)
        for rounding, by_overflow in entry["outcomes"].items():
            got = by_overflow["SATURATE"]
            assert Fraction(got) == Fraction(float(decode(encode(x, fmt, rounding=Rounding[rounding]), fmt)))
        if not fmt.has_nan:
            assert {by_overflow[Overflow.TO_NONFINITE.name] for by_overflow in entry["outcomes"].values()} == {None}
    for entry in result["blocks"]:
        t = quantize([[x]], BLOCK_FORMATS[entry["format"]])
        if not entry["scale_rules"] or t.format.default_scale_rule.name in entry["scale_rules"]:
            assert entry["code"] == t.codes.item()


def test_json_of_a_code():
    result = document("0x7e")
    assert result["code"] == 126
    assert result["too_narrow"] == ["E2M1", "E2M3", "E3M2"]
    assert [entry["format"] for entry in result["formats"]] == ["E4M3", "E5M2", "E8M0", "BF16", "FP16", "FP32", "INT8"]
    assert result["formats"][0]["value"] == "448"
    assert result["formats"][1]["value"] == "nan"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_json_of_what_is_no_number(text):
    result = document(text)
    assert result["value"] == text
    assert all(entry["error"] is None for entry in result["formats"])
