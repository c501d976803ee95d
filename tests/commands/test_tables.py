"""Tables at every width: what gives way, in which order, and that no number is ever cut."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from mxsim.commands.tables import Column, print_table

COLUMNS = [
    Column("", "left"),
    Column("kept for backward"),
    Column("rate"),
    Column("spread", is_optional=True),
]
ROWS = [
    ["activation bytes kept, MXFP4 / BF16", "872.4 MB", "4.160 TB/s", "0.3 %"],
    [Text("skewed", "bold"), "", "", ""],
    ["x", "1.0 kB", "778.8 TFLOP/s", "12.0 %"],
]


def printed(width, columns=COLUMNS, rows=ROWS):
    console = Console(width=width, file=io.StringIO())
    print_table(console, "title", columns, rows)
    return [line.rstrip() for line in console.file.getvalue().splitlines()[2:]]


def test_what_gives_way_first():
    assert printed(80)[:2] == [
        "                                     kept for backward           rate  spread",
        "activation bytes kept, MXFP4 / BF16           872.4 MB     4.160 TB/s   0.3 %",
    ]
    assert printed(75)[1] == "activation bytes kept, MXFP4 / BF16          872.4 MB    4.160 TB/s  0.3 %"  # gaps
    assert printed(70)[:2] == [  # the optional column
        "                                    kept for backward          rate",
        "activation bytes kept, MXFP4 / BF16          872.4 MB    4.160 TB/s",
    ]
    assert printed(60)[:3] == [  # headers
        "                                    kept for",
        "                                    backward          rate",
        "activation bytes kept, MXFP4 / BF16 872.4 MB    4.160 TB/s",
    ]
    assert printed(50)[2:6] == [  # text
        "activation bytes kept, 872.4 MB    4.160 TB/s",
        "  MXFP4 / BF16",
        "skewed",
        "x                        1.0 kB 778.8 TFLOP/s",
    ]


@pytest.mark.parametrize("width", range(36, 90))
def test_nothing_is_cut_but_optional_columns(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in ROWS:
        for cell in row[:3]:
            assert set(str(cell).split()) <= set(words), cell
    assert {"kept", "for", "backward", "rate"} <= set(words)


def test_the_widest_text_gives_way_first():
    columns = [Column("recipe", "left"), Column("recomputed", "left")]
    rows = [["MXFP4 with one thing changed", "core-attn, mla-up-proj, layernorm, moe-experts"]]
    assert printed(60, columns, rows) == [
        "recipe                       recomputed",
        "MXFP4 with one thing changed core-attn, mla-up-proj,",
        "                               layernorm, moe-experts",
    ]
    assert printed(30, columns, rows) == [
        "recipe          recomputed",
        "MXFP4 with one  core-attn,",
        "  thing changed   mla-up-proj,",
        "                  layernorm,",
        "                  moe-experts",
    ]


def test_headers_have_no_more_lines_than_they_need():
    columns = [Column("", "left"), Column("mean of the stages")]
    assert printed(20, columns, [["weights", "6.18"]])[:2] == ["        mean of the", "             stages"]
    assert printed(15, columns, [["weights", "6.18"]])[:4] == [
        "          mean",
        "            of",
        "           the",
        "        stages",
    ]


def test_the_last_optional_column_goes_first():
    columns = [Column("us"), Column("spread", is_optional=True), Column("measured as", is_optional=True)]
    assert printed(18, columns, [["1.0", "0.3 %", "queue"]]) == [" us spread", "1.0  0.3 %"]


def test_a_table_without_rows():
    assert printed(80, rows=[]) == ["  kept for backward  rate  spread"]


@pytest.mark.parametrize("width", [1, 10, 20, 40])
def test_a_table_that_no_width_suits_is_whole_all_the_same(width):
    columns = [Column("recipe", "left"), *(Column(name) for name in ("dense", "attention"))]
    rows = [["mxfp4-gradients-stochastic", "12.33", "4.57"], [Text("of a style of its own"), "", "日本語"]]
    assert printed(width, columns, rows) == [
        "recipe                     dense attention",
        "mxfp4-gradients-stochastic 12.33      4.57",
        "of a style of its own               日本語",
    ]


def test_brackets_are_text():
    assert printed(80, [Column("tensor", "left"), Column("dB")], [["w[bold]x[/bold] [/]", "1"]]) == [
        "tensor               dB",
        "w[bold]x[/bold] [/]   1",
    ]
