"""What `sluice up` and `sluice status` draw."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from sluice.deploy.common.state import Deployment
from sluice.protocol.messages import ClusterState, NodeEntry, NodeState

COLOURS = {"starting": "yellow", "ready": "green", "draining": "cyan", "dead": "red"}


class UpDisplay:
    """Shows a supervisor's progress: a spinner until it is ready, then a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner: Status | None = None
        self._states: dict[str, tuple[NodeState, str]] = {}
        self._said: set[str] = set()
        self._announced = False

    def note(self, text: str) -> None:
        if self._console.is_terminal and not self._announced:
            self._spin(escape(text))
        else:
            self._console.print(escape(text))

    def progress(self, cluster: ClusterState) -> None:
        """Show states that are new since the last call."""
        for node in cluster.nodes:
            if self._states.get(node.node_id) != (now := (node.state, node.detail)):
                self._states[node.node_id] = now
                self._changed(node)
        if not self._announced and self._console.is_terminal:
            self._spin("  ".join(_coloured(node.node_id, node.state) for node in cluster.nodes))

    def waits_for(self, what: str) -> None:
        """Say once what keeps a process from being started."""
        if what not in self._said:
            self._said.add(what)
            self._console.print(escape(what))

    def ready(self, deployment: Deployment) -> None:
        self._end_spinner()
        self._announced = True
        announce(self._console, deployment)
        self._console.print("[dim]Ctrl-C ends it; running streams finish first.[/]")

    def stopping(self) -> None:
        self._end_spinner()
        self._console.print("stopping: running streams finish, then everything ends")

    def close(self) -> None:
        self._end_spinner()

    def _changed(self, node: NodeEntry) -> None:
        why = f": {escape(node.detail)}" if node.detail else ""
        self._console.print(f"{_coloured(node.node_id, node.state)} {node.state}{why}")

    def _spin(self, text: str) -> None:
        if self._spinner is None:
            self._spinner = self._console.status(text)
            self._spinner.start()
        self._spinner.update(text)

    def _end_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


def announce(console: Console, deployment: Deployment) -> None:
    """Print where a deployment is and what to do with it next."""
    option = "" if deployment.namespace == "sluice" else f" --namespace {deployment.namespace}"
    body = (
        f'{{"model": "{deployment.model}", "max_tokens": 32, "stream": true,\n'
        '         "messages": [{"role": "user", "content": "Define love."}]}'
    )
    console.print(f"\n[bold green]ready[/] at [bold]{deployment.url}[/]\n")
    console.print(f"  curl -N {deployment.url}/v1/chat/completions \\", markup=False)
    console.print("    -H 'content-type: application/json' \\", markup=False)
    console.print(f"    -d '{body}'\n", markup=False)
    for command, what in (
        ("sluice status", "nodes, their load and their pages"),
        ("sluice chat", "talk to the model"),
        ("sluice scale decode 2", "more nodes, while it runs"),
        ("sluice down", "end it"),
    ):
        console.print(f"  {command + option:<40} [dim]{what}[/]")
    console.print()


def status_table(status: dict[str, Any]) -> Table:
    """Nodes with their load and the used pages of each pool."""
    table = Table(title="  ".join(f"{r}: target {n}" for r, n in status["targets"].items()))
    for column in ("node", "state", "host"):
        table.add_column(column)
    table.add_column("running", justify="right")
    table.add_column("waiting", justify="right")
    table.add_column("pages in use")
    for node in status["nodes"]:
        pools = "\n".join(
            f"{name} {pages['used']}/{sum(pages.values())}" for name, pages in node["pools"].items()
        )
        table.add_row(
            node["id"],
            _coloured(node["state"], node["state"]),
            node["host"],
            str(node["running"]),
            str(node["waiting"]),
            pools or escape(node["detail"]),
        )
    return table


def _coloured(text: str, state: str) -> str:
    return f"[{COLOURS[state]}]{escape(text)}[/]"
