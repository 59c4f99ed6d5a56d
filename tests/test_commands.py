"""Documents that run: every command in them exists with its flags, every config in them is one.

Looked through are README, CONTRIBUTING, docs/, every docstring, and the commands that result files
say they were made by.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from sluice.deploy.cli import app
from sluice.protocol.config import parse_config

ROOT = Path(__file__).parents[1]
CLI = typer.main.get_command(app)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = [path.parent for path in ROOT.glob("*/__init__.py")] + [ROOT / "tests"]
SOURCES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
RESULTS = sorted((ROOT / "benchmarks/results").rglob("*.csv"))
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"`([^`\n]+)`")
TOP = "|".join(path.parent.name for path in ROOT.glob("*/__init__.py"))
PATH = re.compile(rf"(?<![\w/.*])(?:{TOP}|tests|docs)/[\w./*-]+")
COMMAND = re.compile(r"(?:^|\s|/)((?:sluice [a-z][a-z-]|make [a-z]|python -m sluice)[^#|;]*)")


def texts() -> Iterator[tuple[str, str]]:
    """Where it stands, and each line that may be a command."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [line for _, block in BLOCK.findall(text) for line in block.splitlines()]
        for line in (*lines, *QUOTED.findall(BLOCK.sub("", text))):
            yield path.name, line
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                said = ast.get_docstring(node) or ""
                indented = [line for line in said.splitlines() if line.startswith("    ")]
                for line in (*indented, *QUOTED.findall(said)):
                    yield str(path.relative_to(ROOT)), line
    for path in RESULTS:
        with path.open(encoding="utf-8", newline="") as file:
            for command in {row["command"] for row in csv.DictReader(file) if "command" in row}:
                yield path.name, command


def commands_of(line: str) -> list[str]:
    """What of the line would be run, without comments and what is piped on."""
    return [found.strip() for part in line.split("&&") for found in COMMAND.findall(part)]


def fault_of(command: str) -> str | None:
    """What about the command does not exist; None if it would start."""
    words = command.replace("[", " ").replace("]", " ").split()
    if words[0] == "make":
        targets = (ROOT / "Makefile").read_text()
        return None if re.search(rf"^{words[1]}:", targets, re.MULTILINE) else words[1]
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    if words[0] == "sluice":
        return _cli_fault(words[1:], flags)
    file = ROOT.joinpath(*words[2].split(".")[1:]).with_suffix(".py")
    if not file.is_file():
        return words[2]
    source = file.read_text(encoding="utf-8")
    return next((flag for flag in flags if not _is_flag(flag, source)), None)


def _is_flag(flag: str, source: str) -> bool:
    """Whether a script takes it: by argparse, or as a parameter of a typer command."""
    parameter = flag.removeprefix("--").replace("-", "_")
    return f'"{flag}"' in source or re.search(rf"^    {parameter}: ", source, re.M) is not None


def _cli_fault(words: list[str], flags: list[str]) -> str | None:
    command = CLI.commands.get(words[0])
    if command is None:
        return words[0]
    known = {name for parameter in command.params for name in parameter.opts}
    known |= {name for parameter in command.params for name in parameter.secondary_opts}
    return next((flag for flag in flags if flag not in known), None)


def test_every_command_that_is_named_exists_with_its_flags():
    found = [(place, command) for place, line in texts() for command in commands_of(line)]
    assert len(found) > 60 and len({place for place, _ in found}) > 20
    faults = [f"{place}: {command}: no {fault}" for place, command in found
              if (fault := fault_of(command)) is not None]  # fmt: skip
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "command",
    [
        "sluice fly",
        "sluice up a.yaml --fast",
        "make tea",
        "python -m sluice.benchmarks.nothing",
        "python -m sluice.benchmarks.payload --nothing 3",
    ],
)
def test_a_command_that_does_not_exist_is_seen(command):
    for line in (command, f"{command}   # and why", f". x && {command}"):
        [found] = commands_of(line)
        assert fault_of(found) is not None


@pytest.mark.parametrize("name", sorted(CLI.commands))
def test_every_command_says_what_it_does(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output


def configs() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        for kind, block in BLOCK.findall(path.read_text(encoding="utf-8")):
            if kind == "yaml" and "scrape_configs" not in block:  # Prometheus' own
                yield path.name, block


@pytest.mark.parametrize(("document", "text"), list(configs()))
def test_every_config_in_a_document_is_one(document, text):
    parse_config(yaml.safe_load(text), source=document)


def test_there_are_configs_in_documents():
    assert len(list(configs())) >= 3


def test_every_path_in_a_document_is_there():
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for found in PATH.findall(text):
            name = found.rstrip(".")
            assert list(ROOT.glob(name)) or "models/smollm2" in name, f"{path.name}: {found}"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_nobody_is_told_to_install_the_other_project_that_has_our_name():
    """`sluice` on PyPI is a stranger's."""
    for path in (*DOCUMENTS, *ROOT.glob("deploy/**/*.yaml"), ROOT / "Makefile", *SOURCES):
        if path == Path(__file__):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            said = re.search(r"pip install(?: -\S+| --\S+)* ['\"]?sluice\b(?!/)", line)
            assert said is None, f"{path}: {line}"
