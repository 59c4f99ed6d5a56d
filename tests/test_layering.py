"""Which folder may import which: the table in CONTRIBUTING, walked over every import statement."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALL = {
    "benchmarks", "cache", "decode_node", "deploy", "engine", "kernels", "model", "prefill_node",
    "protocol", "router", "transfer",
}  # fmt: skip
NODE = {"engine", "transfer", "model", "cache", "protocol"}
ALLOWED = {
    "kernels": set(),
    "cache": set(),
    "protocol": {"cache.spec", "cache.row_format", "cache.journal"},
    "model": {"kernels", "cache.spec", "cache.row_format", "protocol"},
    "engine": {"model", "cache", "kernels", "protocol"},
    "transfer": {"cache", "protocol"},
    "prefill_node": NODE,
    "decode_node": NODE,
    "router": {"cache.spec", "cache.keys", "cache.journal", "protocol"},
    "deploy": ALL,
    "benchmarks": ALL,
}
# Rooms of a folder, and which of its rooms each may import; "" is what lies in none. A room comes
# after those it may import, so that no two import each other.
ROOMS = {
    "router": {
        "common": set(),
        "text.answers": set(),
        "text.grammar": set(),
        "text.v4": {"text.answers", "text.grammar"},
        "text.families": {"text.answers", "text.grammar"},
        "text": {"common", "text.answers", "text.v4", "text.families"},
        "reading": {"common", "text", "text.answers", "text.v4"},
        "dispatch": {"common"},
        "canary": {"common"},
        "": {"common", "text", "text.answers", "reading", "dispatch", "canary"},
        "openai": {"", "common", "text", "text.answers", "reading"},
        "openai.responses": {"", "openai", "text", "text.answers", "reading"},
        "anthropic": {"", "common", "openai", "text.answers", "reading"},
        "http": {"", "common", "canary", "openai", "openai.responses", "anthropic", "reading"},
    },
    "deploy": {
        "common": set(),
        "cluster": {"common"},
        "controller": {"common"},
        "actors": {"common", "cluster", "controller"},
        "commands": {"common", "cluster", "actors"},
        "compare": {"common", "commands"},
        "": {"common", "commands", "compare"},
    },
    "model": {
        "common": set(),
        "v4": {"common"},
        "dense": {"common"},
        "gguf": {"common"},
        "": {"common", "v4", "dense"},
    },
}
MAX_FILES = 13  # of a room
TORCH_FREE = (
    "cache/clock.py",
    "cache/spec.py",
    "cache/journal.py",
    "protocol",
    "router",
)


def imports_of(path):
    """Modules of ours that the file imports, without the leading `sluice.`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        else:
            continue
        yield from (name.removeprefix("sluice.") for name in names if name.startswith("sluice."))


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_folder_imports_only_what_its_row_allows(folder):
    for path in sources(folder):
        for module in imports_of(path):
            parts = module.split(".")
            allowed = {folder, *ALLOWED[folder]}
            assert {parts[0], ".".join(parts[:2])} & allowed, f"{path}: imports sluice.{module}"


def room_of(module, rooms):
    """The room that a module of the folder lies in, by its dotted name without the folder's."""
    inside = [room for room in rooms if room and f"{module}.".startswith(f"{room}.")]
    return max(inside, key=len, default="")


@pytest.mark.parametrize("folder", sorted(ROOMS))
def test_a_room_imports_only_rooms_below_it(folder):
    rooms, below = ROOMS[folder], set()
    for room, allowed in rooms.items():
        assert allowed <= below, f"{folder}/{room}: {allowed - below} comes after it"
        below.add(room)
    for path in sources(folder):
        own = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
        room = room_of(own, rooms)
        for module in imports_of(path):
            if module.startswith(f"{folder}."):
                other = room_of(module.removeprefix(f"{folder}."), rooms)
                assert other in {room, *rooms[room]}, f"{path}: imports sluice.{module}"


@pytest.mark.parametrize("folder", sorted(ROOMS))
def test_a_room_is_small_and_has_a_line_in_the_table(folder):
    for place in {path.parent for path in sources(folder)}:
        room = ".".join(place.relative_to(ROOT / folder).parts)
        assert room in ROOMS[folder], f"{place}: has no line in ROOMS"
        files = [path for path in place.glob("*.py") if path.stem != "__init__"]
        assert len(files) <= MAX_FILES, f"{place}: {len(files)} files"


def test_only_deploy_knows_ray():
    for folder in ALL - {"deploy"}:
        for path in sources(folder):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    assert all(a.name.split(".")[0] != "ray" for a in node.names), path
                if isinstance(node, ast.ImportFrom):
                    assert (node.module or "").split(".")[0] != "ray", path


def test_the_routers_modules_load_without_torch():
    modules = [
        ".".join(("sluice", *path.relative_to(ROOT).with_suffix("").parts))
        for part in TORCH_FREE
        for path in (sources(part) if (ROOT / part).is_dir() else [ROOT / part])
        if path.stem != "__init__"
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
