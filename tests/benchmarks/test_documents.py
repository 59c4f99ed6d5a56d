"""Pages of docs/ that are made of something else are current, and it shows if they are not."""

from __future__ import annotations

import csv

import pytest
from pydantic import Field

from sluice.benchmarks import config_keys, sheets
from sluice.benchmarks.documents import DOCS, PAGES, current
from sluice.benchmarks.provenance import RESULTS
from sluice.benchmarks.sheets import SHEETS, WIDTH, benchmarks_page
from sluice.protocol.config import SluiceConfig


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_is_current(name):
    page = DOCS / name
    assert page.read_text(encoding="utf-8") == current(page, PAGES[name]()), "run `make docs`"


def test_another_figure_or_another_key_would_not_be_current(tmp_path, monkeypatch):
    page = DOCS / "benchmarks.md"
    monkeypatch.setattr(sheets, "RESULTS", tmp_path)
    for sheet in SHEETS:
        (tmp_path / sheet.file).write_bytes((RESULTS / sheet.file).read_bytes())
    assert current(page, benchmarks_page()) == page.read_text(encoding="utf-8")
    path = tmp_path / "keep_alive.csv"
    path.write_text(path.read_text().replace(",2530,", ",2531,"))
    assert current(page, benchmarks_page()) != page.read_text(encoding="utf-8")

    class Longer(SluiceConfig):
        new_key: int = Field(5, ge=0)

    monkeypatch.setattr(config_keys, "SluiceConfig", Longer)
    made = config_keys.configuration_page()
    assert "- `new_key`: whole number from 0; default `5`." in made


def test_every_result_is_on_the_page_or_beside_one_that_is():
    shown = {sheet.file for sheet in SHEETS}
    beside = {"load_memory.csv", "kernel_resources.csv", "mutants.csv"}  # of hundreds of lines
    assert {path.name for path in RESULTS.glob("*.csv")} == shown | beside


def test_tables_fit_into_eighty_columns():
    inside = False
    for line in benchmarks_page().splitlines():
        inside ^= line == "```"
        assert not inside or len(line) <= WIDTH, line
        assert "…" not in line, "nothing is cut off"


def test_a_sheet_shows_columns_that_its_file_has():
    for sheet in SHEETS:
        with (RESULTS / sheet.file).open(encoding="utf-8", newline="") as file:
            columns = next(csv.reader(file))
        assert {*sheet.columns, *sheet.only, *sheet.summed} <= set(columns), sheet.file


def test_every_key_of_the_config_is_explained():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for line in page.split("## Every key")[1].replace("\n  ", " ").splitlines():
        if line.startswith("- `"):
            assert line.split(": ", 1)[1].count(". ") >= 1 and line.endswith("."), line


def test_a_page_without_a_place_for_it_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match=r"page\.md: expected <!-- made by"):
        current(page, "made")
