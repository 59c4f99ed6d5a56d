"""The router's process is light: no torch, no Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sluice.router


def test_no_router_module_imports_torch_or_ray():
    folder = Path(sluice.router.__file__).parent
    paths = (path.relative_to(folder).with_suffix("") for path in sorted(folder.rglob("*.py")))
    names = [".".join(path.parts) for path in paths if path.name != "__init__"]
    assert "http.app" in names
    imports = "; ".join(f"import sluice.router.{name}" for name in names)
    check = "import sys; print([m for m in ('torch', 'ray', 'triton') if m in sys.modules])"
    command = [sys.executable, "-c", f"{imports}; {check}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
