"""The `sluice` command: start, look at, change and end deployments, and talk to them.

`up` is the supervisor of what it starts. The other commands find the deployment by its state file
and speak HTTP to its router, so that they answer at once; none of them imports Ray or torch.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import Progress

from sluice.deploy.commands import chat as conversation
from sluice.deploy.commands import detach, locate, preflight
from sluice.deploy.commands.display import UpDisplay, announce, status_table
from sluice.deploy.commands.prose import paragraphs
from sluice.deploy.common import state
from sluice.deploy.common.http_client import RouterClient
from sluice.deploy.common.reporting import reporting, stderr, stdout
from sluice.protocol.config import SluiceConfig, load_config, with_prefix_secret
from sluice.protocol.messages import ConfigError, NodeError, Role
from sluice.protocol.reading import read_text, reading

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve a language model with prefill and decode on separate nodes.",
)

POLL_S = 0.2

Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]
Namespace = Annotated[
    str | None, typer.Option(help="Which deployment, if several run. [default: the only one]")
]
Url = Annotated[str | None, typer.Option(help="The router's URL, instead of a local deployment.")]
ApiKey = Annotated[str | None, typer.Option(help="Key to send, if the router wants one.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return before it has happened.")]


@app.command()
@reporting
def up(
    config: Annotated[Path, typer.Argument(help="A YAML file, for example configs/local.yaml.")],
    detached: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
    namespace: Annotated[
        str | None, typer.Option(help="Name of the deployment, instead of the config's.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the router, instead of the config's; 0: any.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Start a deployment and supervise it until Ctrl-C."""
    settings = _with_overrides(load_config(config), namespace, port)
    preflight.check_namespace(settings.ray.namespace)
    state.check_free(settings.ray.namespace)  # before its own port is found to be taken
    preflight.check(settings)
    if detached:
        _up_detached(config, settings)
        return
    from sluice.deploy.commands.supervisor import supervise

    display = UpDisplay(stdout)
    try:
        supervise(with_prefix_secret(settings), config, display)
    finally:
        display.close()


@app.command()
@reporting
def down(
    namespace: Namespace = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for running streams.")] = 120.0,
    debug: Debug = False,
) -> None:
    """End a deployment; running streams finish first, and are cut after the timeout."""
    found = locate.deployment(namespace)
    with stderr.status(f"ending {found.namespace}"):
        detach.stop(found, timeout, _say)
    stdout.print(f"{found.namespace} has ended")


@app.command()
@reporting
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    namespace: Namespace = None,
    url: Url = None,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Show nodes, their load and their pages."""
    with locate.router(url, namespace, api_key) as router:
        found = router.status()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        stdout.print(router.url)
        stdout.print(status_table(found))


@app.command()
@reporting
def scale(
    role: Annotated[Role, typer.Argument(help="prefill or decode")],
    replicas: Annotated[int, typer.Argument(help="How many nodes there should be.", min=0)],
    no_wait: NoWait = False,
    namespace: Namespace = None,
    url: Url = None,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Change the number of nodes of a role while it serves."""
    with locate.router(url, namespace, api_key) as router:
        router.scale(role.value, replicas)
        if not no_wait:
            _wait(router, f"scaling {role} to {replicas}", lambda s: _settled(s, role, replicas))
    stdout.print(f"{role}: target {replicas}" if no_wait else f"{role}: {replicas} ready")


@app.command()
@reporting
def drain(
    node: Annotated[str, typer.Argument(help="A node's id, for example decode-1.")],
    no_wait: NoWait = False,
    namespace: Namespace = None,
    url: Url = None,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Take a node away after what runs on it has finished; its role's target falls by one."""
    with locate.router(url, namespace, api_key) as router:
        router.drain(node)
        if not no_wait:
            _wait(router, f"draining {node}", lambda s: _node(s, node) is None)
    stdout.print(f"{node} is draining" if no_wait else f"{node} is gone")


@app.command()
@reporting
def chat(
    message: Annotated[str | None, typer.Argument(help="One message; without it, a talk.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    system_file: Annotated[
        Path | None, typer.Option(help="A text file as the system message.", dir_okay=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest.", min=0)] = 0.0,
    namespace: Namespace = None,
    url: Url = None,
    api_key: ApiKey = None,
    debug: Debug = False,
) -> None:
    """Talk to the model, with streamed answers."""
    messages = _system_message(system, system_file)
    with locate.router(url, namespace, api_key) as router:
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        if message is None:
            conversation.converse(router, stdout, messages, **sampling)
        else:
            messages.append({"role": "user", "content": message})
            conversation.answer(router, stdout, messages, **sampling)


@app.command()
@reporting
def compare(
    config_a: Annotated[Path, typer.Argument(help="A YAML file: deployment A.")],
    config_b: Annotated[Path, typer.Argument(help="A YAML file: deployment B.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="One prompt a line: text, or JSON with `prompt` or `prompt_token_ids`. "
            "[default: passages of the shipped novel, of 64 to 4,000 tokens]"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the report, the CSV files and the plot.")
    ] = Path("comparison"),
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each answer.", min=2)] = 16,
    url_a: Annotated[str | None, typer.Option(help="Where A runs already.")] = None,
    url_b: Annotated[str | None, typer.Option(help="Where B runs already.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw the figures over the prompts' length.")] = True,
    debug: Debug = False,
) -> None:
    """Send the same prompts through two deployments: same answers? at what cost?"""
    from sluice.deploy.compare import compare as comparison

    a = comparison.make_side("A", config_a, url_a)
    b = comparison.make_side("B", config_b, url_b)
    comparison.compare((a, b), prompts_file=prompts, max_tokens=max_tokens, out=out, plot=plot)


@app.command("make-checkpoint")
@reporting
def make_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Where to write it; made if need be.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights.", min=0, max=2**63 - 1)] = 0,
    csa_ratio: Annotated[
        int, typer.Option(help="Tokens of a finely compressed row.", min=1, max=4096)
    ] = 4,
    hca_ratio: Annotated[
        int, typer.Option(help="Tokens of a coarsely compressed row.", min=1, max=4096)
    ] = 128,
    window: Annotated[
        int, typer.Option(help="Tokens that attention sees raw.", min=1, max=2**20)
    ] = 32,
    vocab_size: Annotated[
        int, typer.Option(help="Tokens the tokenizer knows.", min=2, max=2**20)
    ] = 1024,
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of a request.", min=1, max=2**30)
    ] = 8192,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the matrices.")
    ] = "float32",
    debug: Debug = False,
) -> None:
    """Write a small DeepSeek-V4 checkpoint with random weights, for tests."""
    from sluice.model.make_checkpoint import TINY  # loads torch
    from sluice.model.make_checkpoint import make_checkpoint as make

    with reading(f"{folder}", "give a folder that can be made, or an empty one"):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty, expected a new or empty folder")
    config = dataclasses.replace(
        TINY,
        csa_ratio=csa_ratio,
        hca_ratio=hca_ratio,
        sliding_window=window,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
    )
    with reading(f"{folder}", "give a folder that can be written"):
        make(folder, config=config, seed=seed, texts=paragraphs(), dtype=dtype)
    stdout.print(f"{folder}: seed {seed}, ratios {csa_ratio} and {hca_ratio}, window {window}")


@app.command("import-gguf")
@reporting
def import_gguf(
    source: Annotated[
        str, typer.Argument(help="A *.gguf file, or a folder or installed package with one.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write it; made if need be.")],
    debug: Debug = False,
) -> None:
    """Convert a GGUF file to a checkpoint folder, exactly: float32 takes 4 bytes a weight."""
    from sluice.model.gguf.file import find_gguf  # loads numpy
    from sluice.model.gguf.importing import import_gguf as convert

    file = find_gguf(source)
    with Progress(*Progress.get_default_columns(), console=stderr) as progress:
        task = progress.add_task(f"reading {file.name}", total=None)

        def show(done: int, total: int) -> None:
            what = "de-quantising" if done < total else "writing"
            progress.update(task, description=what, completed=done, total=total)

        with reading(f"{file} to {folder}", "give a folder that can be written"):
            convert(file, folder, show)
    stdout.print(f"{folder}: {file.name}, ready to be served as model.path")


def _up_detached(config: Path, settings: SluiceConfig) -> None:
    namespace, port = settings.ray.namespace, settings.router.port
    arguments = [str(config), "--namespace", namespace, "--port", str(port)]
    with stderr.status(f"starting {namespace} (log: {state.log_file(namespace)})"):
        deployment = detach.start(namespace, arguments, _say)
    announce(stdout, deployment)


def _with_overrides(
    settings: SluiceConfig, namespace: str | None, port: int | None
) -> SluiceConfig:
    """The config with the command line's values in place of the file's."""
    changes: dict[str, Any] = {}
    if namespace is not None:
        changes["ray"] = settings.ray.model_copy(update={"namespace": namespace})
    if port is not None:
        changes["router"] = settings.router.model_copy(update={"port": port})
    return settings.model_copy(update=changes)


def _system_message(text: str | None, file: Path | None) -> list[dict[str, str]]:
    if file is not None:
        if text is not None:
            raise ConfigError("--system and --system-file were both given, expected one of them")
        text = read_text(file, "--system-file", "give a UTF-8 text")
    return [] if text is None else [{"role": "system", "content": text}]


def _wait(router: RouterClient, what: str, done: Callable[[dict[str, Any]], bool]) -> None:
    """Poll the status until `done`; Ctrl-C only stops the waiting.

    Says what nodes wait for that have no place, and why nodes died that did not live from now on.
    """
    found = router.status()
    said = {_words(node) for node in found["nodes"] if node["state"] == "dead"}
    with stderr.status(what):
        while not done(found):
            told = [node for node in found["nodes"] if node["state"] in ("starting", "dead")]
            for words in [_words(node) for node in told if node["detail"]]:
                if words not in said:
                    said.add(words)
                    _say(words)
            time.sleep(POLL_S)
            found = router.status()


def _words(node: dict[str, Any]) -> str:
    return f"{node['id']} {node['state']}: {node['detail']}"


def _say(words: str) -> None:
    if words:
        stderr.print(escape(words))


def _settled(status: dict[str, Any], role: Role, replicas: int) -> bool:
    """Whether exactly `replicas` nodes of the role are ready and none is on its way."""
    nodes = [node for node in status["nodes"] if node["role"] == role]
    states = [node["state"] for node in nodes if node["state"] != "dead"]
    if (target := status["targets"][role]) != replicas:
        raise NodeError(f"somebody else has set {role} to {target} meanwhile")
    return states == ["ready"] * replicas


def _node(status: dict[str, Any], node_id: str) -> dict[str, Any] | None:
    return next((n for n in status["nodes"] if n["id"] == node_id and n["state"] != "dead"), None)


if __name__ == "__main__":
    app()
