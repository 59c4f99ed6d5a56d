"""What the benchmark clients have in common: a command that is run, and its report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODEL_FOLDER = sys.argv[3]  # its tokenizer counts tokens


def run(*command: str, **environment: str) -> str:
    """Run a command of the clients' environment; its output. Raises RuntimeError if it fails."""
    program = Path(sys.executable).with_name(command[0])
    ended = subprocess.run(
        [program, *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | environment,
    )
    if ended.returncode:
        raise RuntimeError(f"{command[0]}: {(ended.stderr or ended.stdout)[-2000:]}")
    return ended.stdout
