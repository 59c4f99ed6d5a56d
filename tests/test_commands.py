"""Every command that a document names exists, and what is to be installed is this project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from sluice.deploy.cli import app

ROOT = Path(__file__).parents[1]
COMMANDS = set(typer.main.get_command(app).commands)
CODE = re.compile(r"`([^`\n]+)`")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
FILES = [
    *DOCUMENTS,
    *ROOT.glob("deploy/**/*.yaml"),
    ROOT / "Makefile",
    *(path for path in ROOT.glob("*/*.py") if path.parent.name != "tests"),
]


def commands_of(text: str) -> list[str]:
    """Commands in quotes or in blocks, without the comment after them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    quoted = CODE.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return [part.strip() for line in (*lines, *quoted) for part in re.split("&&|#", line)]


def module_file(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_a_document_exists(document):
    for command in commands_of(document.read_text(encoding="utf-8")):
        words = command.split()
        if words[:1] == ["sluice"] and len(words) > 1:
            assert words[1] in COMMANDS, command
        if (module := re.search(r"python -m (sluice\.\w+\.\w+)", command)) is not None:
            assert module_file(module[1]).is_file(), command
        for path in re.findall(r"(?<![\w/])(?:deploy|tests|benchmarks|docs)/[\w./-]+", command):
            assert (ROOT / path).exists() or "models/smollm2" in path, command
        if words[:1] == ["make"]:
            targets = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{words[1]}:", targets, re.MULTILINE), command


def test_every_benchmark_in_the_table_of_evidence_is_a_script():
    rows = re.findall(r"^\| .+? \| `([^`]+)` \| .+\|$", (ROOT / "README.md").read_text(), re.M)
    named = [row for row in rows if " " not in row and re.fullmatch(r"[a-z_]+", row)]
    assert len(named) > 10
    for name in named:
        assert (ROOT / "benchmarks" / f"{name}.py").is_file(), name


def test_nobody_is_told_to_install_the_other_project_that_has_our_name():
    """`sluice` on PyPI is a stranger's."""
    for path in FILES:
        for line in path.read_text(encoding="utf-8").splitlines():
            said = re.search(r"pip install(?: -\S+| --\S+)* ['\"]?sluice\b(?!/)", line)
            assert said is None, f"{path}: {line}"
