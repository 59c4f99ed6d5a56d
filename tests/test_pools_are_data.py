"""No pool is named outside model/: everything else iterates over the specs."""

import re
from pathlib import Path

import pytest

from sluice.model.presets import preset_pools

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "benchmarks", "cache", "decode_node", "deploy", "engine", "kernels", "prefill_node", "protocol",
    "router", "transfer",
)  # fmt: skip


def test_every_folder_but_the_models_is_looked_at():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*FOLDERS, "model"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_source_file_names_a_pool(folder):
    names = re.compile("|".join(rf"\b{spec.name}\b" for spec in preset_pools("v4-flash")))
    for path in (ROOT / folder).rglob("*.py"):
        found = names.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path} names the pool {found.group()}"
