"""The page of the exhibits is the one that their tables give, and says what each of them has to."""

import re

import pytest

from paper_figures import page
from paper_figures.exhibit import PAPER_ORDER, TOPICS, Row, compared, load


def test_the_committed_page_is_current():
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "mxsim figures brings it up to date"


def test_the_paper_s_exhibits_come_first_in_its_order():
    claimed = [topic for topic in TOPICS if load(topic).EXHIBIT.claim]
    assert TOPICS[: len(claimed)] == claimed
    assert claimed == [topic for topic in PAPER_ORDER if topic in claimed]
    headings = re.findall(r'^### <a name="(\w+)">', page.text(), flags=re.M)
    assert headings == TOPICS


@pytest.mark.parametrize("topic", TOPICS)
def test_an_exhibit_says_what_it_has_to(topic):
    module = load(topic)
    exhibit = module.EXHIBIT
    assert exhibit.title
    assert len(exhibit.alt) > 40
    assert exhibit.hardware
    assert page.finding(module)
    for sentence in (exhibit.alt, exhibit.note, *([exhibit.claim] if exhibit.claim else [])):
        assert sentence.endswith(".")
    assert bool(exhibit.claim) == bool(exhibit.paper_hardware)
    if exhibit.claim and (table := page.table_of(topic)) is not None:
        rows = page.rows_of(exhibit, table)
        assert rows
        for row in rows:
            assert row.what and row.paper and row.ours  # noqa: PT018
        assert all("nan" not in cell.lower() for row in rows for cell in row)


def test_residuals_of_table_1_are_differences_of_what_stands_beside_them():
    rows = [row for row in page.rows_of(load("table1").EXHIBIT, page.table_of("table1")) if row.what.startswith("mem")]
    assert len(rows) == 5
    for row in rows:
        paper, ours, residual = (float(cell.split()[0]) for cell in row[1:])
        assert residual == pytest.approx(ours - paper, abs=0.011)


def test_compared():
    assert compared("a", 1.5, 1.25) == Row("a", "1.25", "1.50", "+0.25")
    assert compared("a", 1.7, (1.6, 1.9), digits=1) == Row("a", "1.6 to 1.9", "1.7", "+0.0")
    assert compared("a", 1.5, (1.6, 1.9), digits=1, unit="x") == Row("a", "1.6 to 1.9x", "1.5x", "-0.1x")
    assert compared("a", 1.9999, 2.0).residual == "+0.00"  # no minus zero


def test_what_is_not_measured_is_marked(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "DATA", tmp_path)
    section = page.text().split('<a name="dispatch">')[1].split("###")[0]
    assert page.NOT_MEASURED in section
    assert "out/dispatch.png" not in section
    assert "|" not in section
