"""Editors find what is imported: pyright, which they run, resolves `from sluice.x import y`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYRIGHT = Path(sys.executable).with_name("basedpyright")


@pytest.mark.skipif(
    not (ROOT / "build/ide/sluice").exists(), reason="`make install` makes the link"
)
@pytest.mark.parametrize(
    "file", ["router/http/app.py", "decode_node/node.py", "tests/nodes/conftest.py"]
)
def test_every_import_of_ours_leads_somewhere(file):
    command = [PYRIGHT, "--pythonpath", sys.executable, "--outputjson", file]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    report = json.loads(told)
    assert report["summary"]["filesAnalyzed"] == 1
    lost = [
        problem["message"]
        for problem in report["generalDiagnostics"]
        if problem.get("rule", "").startswith("reportMissing") and "sluice" in problem["message"]
    ]
    assert not lost, lost
