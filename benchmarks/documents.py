"""The parts of docs/ that are made of something else: keys of the config, figures of benchmarks.

    python -m sluice.benchmarks.documents [--check]      make docs

docs/configuration.md lists every key as its model declares it, docs/benchmarks.md shows the results
in benchmarks/results/, each with its command, commit and machine. --check changes nothing and exits
with 1 if a page is not current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sluice.benchmarks.config_keys import configuration_page
from sluice.benchmarks.sheets import benchmarks_page

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- made by `make docs` -->", "<!-- end of what is made -->"
PAGES = {"benchmarks.md": benchmarks_page, "configuration.md": configuration_page}


def current(page: Path, made: str) -> str:
    """The page's text with what is made in its place. Raises ValueError without one."""
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{page}: expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        page = DOCS / name
        text = current(page, make())
        if text != page.read_text(encoding="utf-8"):
            stale.append(name)
        if not check:
            page.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"not current: {', '.join(stale)}; run `make docs`")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
