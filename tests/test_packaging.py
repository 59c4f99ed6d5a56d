"""What is installed is this checkout, whole, and under one name."""

import re
import tomllib
from pathlib import Path

import sluice.cache
import sluice.router

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_packages_listed_are_the_folders_there_are():
    folders = {
        ".".join(("sluice", *path.parent.relative_to(ROOT).parts))
        for top in ROOT.glob("*/__init__.py")
        for path in top.parent.rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_the_code_under_test_is_this_checkout():
    assert Path(sluice.router.__file__).parent == ROOT / "router"
    assert Path(sluice.cache.__file__).parent == ROOT / "cache"


def test_every_direct_dependency_is_pinned_for_the_tests():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras]:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()
        assert name in pinned, f"{requirement} has no pin in constraints.txt"


def test_bare_folder_names_are_banned_as_imports():
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(banned) == folders
