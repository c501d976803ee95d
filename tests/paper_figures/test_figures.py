"""What the figures claim holds on their tables; the tables are reproducible; the pictures can be drawn from them."""

import importlib
import io
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from mxsim.blocks import MXFP4, count_inexact, fp4_row_to_fp8_col, fp4_row_to_fp8_row, quantize
from mxsim.formats import FORMATS, decode
from paper_figures import fig_format_spacing, fig_lossless_window, fig_scale_rules
from paper_figures.__main__ import TOPICS
from paper_figures.files import DATA, real_tensors

COLUMNS = {
    "format_spacing": ["format", "exponent", "num_values", "spacing", "max_relative_error", "rms_relative_error"],
    "lossless_window": ["quantity", "source", "spread", "count", "total"],
    "scale_rules": ["kind", "data", "format", "scale_rule", "num_elements", "sqnr_db"],
}
CHEAP = [fig_format_spacing, fig_lossless_window]  # computed whole in a second or two


def committed(topic):
    return pd.read_csv(DATA / f"{topic}.csv")


def test_the_figures_are_the_ones_tested_here():
    assert sorted(COLUMNS) == TOPICS
    for topic in TOPICS:
        assert topic == importlib.import_module(f"paper_figures.fig_{topic}").TOPIC


# ---- tables ----


@pytest.mark.parametrize("topic", TOPICS)
def test_committed_table_has_the_documented_columns(topic):
    table = committed(topic)
    assert list(table) == COLUMNS[topic]
    assert len(table) > 0
    assert not table.isna().any(axis=None)


@pytest.mark.parametrize("figure", CHEAP, ids=lambda figure: figure.TOPIC)
def test_computing_again_gives_the_committed_bytes(figure, tmp_path):
    table = figure.compute(tmp_path)
    written = (tmp_path / f"{figure.TOPIC}.csv").read_bytes()
    assert written == (DATA / f"{figure.TOPIC}.csv").read_bytes()
    pd.testing.assert_frame_equal(table, committed(figure.TOPIC))


def test_scale_rules_are_reproducible(tmp_path):
    tables = [fig_scale_rules.compute(tmp_path / name, num_blocks=400) for name in ("first", "second")]
    first, second = ((tmp_path / name / "scale_rules.csv").read_bytes() for name in ("first", "second"))
    assert first == second
    assert list(tables[0]) == COLUMNS["scale_rules"]


def test_committed_scale_rules_of_real_tensors_are_current(tmp_path):
    """The real tensors do not depend on num_blocks."""
    table, whole = fig_scale_rules.compute(tmp_path, num_blocks=4), committed("scale_rules")
    pd.testing.assert_frame_equal(*(t[t["kind"] != "distribution"].reset_index(drop=True) for t in (table, whole)))


def test_committed_scale_rules_of_the_normal_distribution_are_current():
    x = fig_scale_rules.sample("normal", fig_scale_rules.NUM_BLOCKS)
    measured = [(fmt.name, rule, sqnr_db) for fmt, rule, sqnr_db in fig_scale_rules.measure(x)]
    table = committed("scale_rules")
    rows = table.loc[table["data"] == "normal", ["format", "scale_rule", "sqnr_db"]]
    assert measured == list(rows.itertuples(index=False, name=None))


# ---- claims: format_spacing ----


def test_values_and_spacing_are_those_of_the_codes():
    for name, rows in committed("format_spacing").groupby("format"):
        values = decode(np.arange(FORMATS[name].max_code + 1), FORMATS[name]).astype(np.float64)
        for row in rows.itertuples():
            inside = values[(values >= 2.0**row.exponent) & (values < 2.0 ** (row.exponent + 1))]
            assert len(inside) == row.num_values
            assert (np.diff(inside) == row.spacing).all()


def test_a_normal_value_is_off_by_at_most_half_an_ulp_and_below_it_the_error_grows_to_all():
    table = committed("format_spacing")
    for name, rows in table.groupby("format"):
        fmt = FORMATS[name]
        normal = rows[rows["exponent"] >= fmt.emin]
        half_ulp = 2.0 ** -(fmt.mantissa_bits + 1)
        assert normal["max_relative_error"].max() == pytest.approx(half_ulp / (1 + half_ulp), abs=1e-6)
        below = rows[rows["exponent"] <= fmt.emin]["max_relative_error"].to_numpy()
        assert (np.diff(below) <= 0).all()
        zero = rows[rows["exponent"] < fmt.emin - fmt.mantissa_bits]["max_relative_error"]
        assert (zero == 1).all()


# ---- claims: scale_rules ----


def test_reference_points_on_the_normal_distribution():
    table = committed("scale_rules")
    rows = table[(table["data"] == "normal") & (table["format"] == "MXFP4")]
    sqnr_db = dict(zip(rows["scale_rule"], rows["sqnr_db"], strict=True))
    assert sqnr_db == pytest.approx(fig_scale_rules.REFERENCE_POINTS, abs=0.02)


def test_what_the_docstring_says_of_the_rules():
    table = committed("scale_rules")
    mxfp4 = table[table["format"] == "MXFP4"].pivot(index="data", columns="scale_rule", values="sqnr_db")
    best = mxfp4.max(axis=1)
    assert (best - mxfp4["EVEN"]).max() < 0.1
    lost_by_ceil = mxfp4["EVEN"] - mxfp4["CEIL"]
    assert [round(lost_by_ceil.min(), 1), round(lost_by_ceil.max(), 1)] == [0.4, 3.3]
    for data in ("log-uniform, 16 binades", "layer5 residual"):
        assert mxfp4.loc[data].idxmin() == "FLOOR"
    nvfp4 = table[table["format"] == "NVFP4"].set_index("data")["sqnr_db"]
    gain = nvfp4 - best
    assert [round(gain.min(), 1), round(gain.max(), 1)] == [1.4, 6.7]


# ---- claims: lossless_window ----


def test_conversion_is_exact_up_to_8_plus_headroom_and_normal_up_to_5_plus_headroom():
    table = committed("lossless_window").set_index(["quantity", "source", "spread"])["count"]
    for headroom in fig_lossless_window.HEADROOMS:
        for spread in fig_lossless_window.SPREADS:
            at = (f"headroom {headroom}", spread)
            assert (table["exact_codes"][at] == 16) == (spread <= 8 + headroom)
            if spread <= 8 + headroom:
                assert (table["subnormal_codes"][at] == 0) == (spread <= 5 + headroom)


def test_the_window_of_headroom_6_holds_every_real_tensor_and_that_of_0_does_not():
    table = committed("lossless_window")
    seen = table[(table["count"] > 0)].groupby("quantity")["spread"].max()
    assert (seen["row_blocks"], seen["column_blocks"]) == (9, 8)
    num_inexact = {0: 0, 6: 0}
    for x in real_tensors().values():
        t = quantize(x, MXFP4)
        for headroom in num_inexact:
            num_inexact[headroom] += count_inexact(t, fp4_row_to_fp8_row(t, headroom=headroom))
            num_inexact[headroom] += count_inexact(t, fp4_row_to_fp8_col(t, headroom=headroom))
    assert num_inexact[0] > 0
    assert num_inexact[6] == 0


# ---- pictures ----


@pytest.mark.parametrize("topic", TOPICS)
def test_drawn_from_the_table_alone_with_units_and_without_warnings(topic):
    picture = importlib.import_module(f"paper_figures.fig_{topic}").draw(committed(topic))
    assert isinstance(picture, Figure)
    picture.savefig(io.BytesIO(), format="png")  # pytest turns a warning into an error
    labels = [label for axes in picture.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert labels
    assert all(label.endswith(")") for label in labels), "every axis label ends in its unit"


def test_an_unknown_topic_is_refused_in_one_line():
    command = [sys.executable, "-m", "paper_figures", "nonsense"]
    run = subprocess.run(command, cwd=DATA.parents[1], capture_output=True, text=True)
    assert run.returncode == 2
    assert "no figure is called nonsense; there are format_spacing, lossless_window, scale_rules" in run.stderr
    assert "Traceback" not in run.stderr
