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
