"""Finds the deployment that a command means, and the key to talk to it."""

from __future__ import annotations

from pathlib import Path

from sluice.deploy.common import state
from sluice.deploy.common.http_client import RouterClient
from sluice.protocol.config import RouterConfig, load_config
from sluice.protocol.messages import ConfigError, Unavailable
from sluice.router.common.auth import read_api_keys


def deployment(namespace: str | None) -> state.Deployment:
    """The deployment of this name, or the only one that runs. Raises ConfigError."""
    if namespace is None:
        namespace = _only_one()
    found = state.find(namespace)
    if found is None:
        others = ", ".join(state.running()) or "none"
        raise ConfigError(
            f"no deployment {namespace!r} is running (running: {others}); "
            "start one with `sluice up CONFIG`"
        )
    return found


def router(url: str | None, namespace: str | None, api_key: str | None) -> RouterClient:
    """A client for the given URL, or for the deployment found by name."""
    if url is not None:
        return RouterClient(url, api_key)
    found = deployment(namespace)
    if not found.url:
        raise Unavailable(
            f"deployment {found.namespace!r} is still starting (pid {found.pid}); "
            "try again in a few seconds"
        )
    config = load_config(Path(found.config)).router
    return RouterClient(found.url, api_key or admin_key(config), config.tls_cert_file)


def _only_one() -> str:
    names = state.running()
    if len(names) > 1:
        raise ConfigError(f"several deployments run: {', '.join(names)}; choose with --namespace")
    if not names:
        raise ConfigError("no deployment is running; start one with `sluice up CONFIG`")
    return names[0]


def admin_key(router: RouterConfig) -> str | None:
    """A key from the deployment's own key file, which its owner may read."""
    key = read_api_keys(router.api_keys_file).for_admin
    return None if key is None else key.decode()
