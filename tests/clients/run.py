"""Real clients, unchanged, against a local deployment: a table of client x session.

    make test-clients                                       all of them
    .venv/bin/python tests/clients/run.py --clients NAMES   some, once that has installed them
    .venv/bin/python tests/clients/run.py --readme          only write README's table anew

Each client runs in a process of its own, in the environment that `make test-clients` makes for
them, so that their dependencies never meet ours. The table is written to
benchmarks/results/clients.csv, and README's is made of that file. Exit code 1 if a session failed.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.hostile import deployed
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv

ROOT = Path(__file__).parents[2]
SESSIONS = Path(__file__).with_name("sessions")
CONFIG = ROOT / "deploy/configs/v4chat.yaml"
MODEL_FOLDER = ROOT / "deploy/models/tiny-v4-chat"
PYTHON = ROOT / ".venv-clients/bin/python"
NODE_MODULES = ROOT / ".venv-clients/node_modules"
CSV, README = RESULTS / "clients.csv", ROOT / "README.md"
BEGIN, END = "<!-- clients: made by tests/clients/run.py -->", "<!-- end of clients -->"
LIMIT_S = 600
OK, NOT_ASKED = "ok", "-"
COLUMNS = ("chat", "stream", "tools", "json", "error", "run", "choose")

# As they are called, what tells their version, and the file of their sessions.
CLIENTS = {
    "openai: chat": ("openai", "openai_chat.py"),
    "openai: responses": ("openai", "openai_responses.py"),
    "anthropic": ("anthropic", "anthropic_messages.py"),
    "litellm": ("litellm", "litellm_client.py"),
    "langchain-openai": ("langchain-openai", "langchain_openai_client.py"),
    "openai-agents": ("openai-agents", "openai_agents.py"),
    "instructor": ("instructor", "instructor_client.py"),
    "pydantic-ai": ("pydantic-ai-slim", "pydantic_ai_client.py"),
    "llama-index": ("llama-index-llms-openai-like", "llama_index_client.py"),
    "lm-eval": ("lm-eval", "lm_eval_run.py"),
    "GuideLLM": ("guidellm", "guidellm_run.py"),
    "AIPerf": ("aiperf", "aiperf_run.py"),
    "AI SDK": ("ai", "ai_sdk.mjs"),
    "JDK HttpClient": ("java", "JdkClient.java"),
}

Row = dict[str, str]  # a line of clients.csv


def command(file: str) -> list[str]:
    if file.endswith(".mjs"):  # node looks for modules beside the file
        shutil.copy(SESSIONS / file, NODE_MODULES.parent / file)
        return ["node", str(NODE_MODULES.parent / file)]
    return ["java" if file.endswith(".java") else str(PYTHON), str(SESSIONS / file)]


def version(name: str) -> str:
    """Of a client that is installed."""
    if name == "java":
        told = subprocess.run(["java", "--version"], capture_output=True, text=True, check=True)
        return told.stdout.split()[1]
    if name == "ai":
        return str(json.loads((NODE_MODULES / "ai/package.json").read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    told = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def measure(client: str, url: str, model: str) -> Row:
    """One client's sessions, each `ok`, NOT_ASKED or how it failed."""
    package, file = CLIENTS[client]
    arguments = [*command(file), url, model, str(MODEL_FOLDER)]
    row = {"client": client, "version": version(package), **dict.fromkeys(COLUMNS, NOT_ASKED)}
    try:
        ended = subprocess.run(
            arguments, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return row | {"run": f"not done within {LIMIT_S} s"}
    told = [line for line in ended.stdout.splitlines() if line.startswith("OUTCOMES ")]
    if not told:
        return row | {"run": f"ended with {ended.returncode}: {ended.stderr[-300:]}"}
    return row | json.loads(told[-1].removeprefix("OUTCOMES "))


def failures(row: Mapping[str, str]) -> list[str]:
    return [f"{name}: {row[name]}" for name in COLUMNS if row[name] not in (OK, NOT_ASKED)]


def table(rows: Sequence[Row]) -> Table:
    shown = Table("client", "version", *COLUMNS)
    for row in rows:
        cells = [row[name] if row[name] in (OK, NOT_ASKED) else "FAILED" for name in COLUMNS]
        shown.add_row(row["client"], row["version"], *cells, style="red" if failures(row) else "")
    return shown


def readme_table(rows: Sequence[Mapping[str, str]]) -> str:
    """README's table: what works, and what does not."""
    lines = [f"| Client | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row in rows:
        marks = [{OK: "✓", NOT_ASKED: ""}.get(row[name], "fails") for name in COLUMNS]
        lines.append(f"| {row['client']} {row['version']} | {' | '.join(marks)} |")
    return "\n".join(lines)


def read_rows(path: Path = CSV) -> list[Row]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def with_table(readme: str, rows: Sequence[Mapping[str, str]]) -> str:
    """README's text with the table of these rows in its place."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{readme_table(rows)}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", default=",".join(CLIENTS), help="names, with commas")
    parser.add_argument("--readme", action="store_true", help="write README's table and stop")
    given = parser.parse_args(arguments)
    if given.readme:
        README.write_text(with_table(README.read_text(), read_rows()))
        return 0
    names = given.clients.split(",")
    if unknown := [name for name in names if name not in CLIENTS]:
        parser.error(f"--clients {', '.join(unknown)}: expected some of {', '.join(CLIENTS)}")
    console, origin = Console(width=120), provenance("make test-clients")
    print_provenance(console, origin)
    rows = []
    with deployed(CONFIG) as deployment, tqdm(names, unit="client") as bar:
        for client in bar:
            bar.set_description(client)
            rows.append(measure(client, deployment.url, deployment.model))
            for failure in failures(rows[-1]):
                bar.write(f"{client}: {failure}")
    console.print(table(rows))
    if names == list(CLIENTS):
        write_csv(CSV, origin, rows)
        README.write_text(with_table(README.read_text(), rows))
    return 1 if any(map(failures, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
