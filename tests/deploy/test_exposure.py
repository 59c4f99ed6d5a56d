"""What others on the network, and other users of the machine, can reach of a deployment."""

import ipaddress
import os
import stat
from pathlib import Path

import psutil
import pytest

from sluice.deploy.cluster import environment as ray_environment
from sluice.deploy.cluster.interfaces import bound, check_interface, interface_of
from sluice.deploy.common import state
from sluice.protocol.config import parse_config
from sluice.protocol.messages import ConfigError


def processes(live):
    supervisor = psutil.Process(live.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def is_loopback(address):
    address = ipaddress.ip_address(address)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.mark.live
def test_a_deployment_of_one_host_listens_on_loopback_only(live):
    listeners = {
        (process.name(), connection.laddr.ip)
        for process in processes(live)
        for connection in process.net_connections(kind="inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)  # TCP, UDP
    }
    assert len(listeners) > 5, "the nodes' transports, Ray's processes and the router"
    assert [name for name, address in listeners if not is_loopback(address)] == []


@pytest.mark.live
def test_no_other_user_can_read_a_file_or_enter_a_folder_of_a_deployment(live):
    files = {
        Path(file.path)
        for process in processes(live)
        for file in process.open_files()
        if "/sluice-" in file.path
    }
    assert len(files) > 5, "Ray's logs"
    assert [path for path in files if is_open(path)] == []
    assert not is_open(state.folder(live.namespace) / "deployment.json")


def is_open(path):
    """Whether others may read the file, and enter every folder above it."""
    if not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return False
    return all(p.stat().st_mode & stat.S_IXOTH for p in path.parents)


@pytest.mark.live
def test_the_token_of_a_ray_of_our_own_is_on_no_command_line(live):
    token = psutil.Process(live.pid).environ()["RAY_AUTH_TOKEN"]
    assert all(token not in " ".join(process.cmdline()) for process in processes(live))


def test_a_ray_of_our_own_has_a_token_that_is_in_its_environment_only(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (ray_environment.AUTH_MODE, ray_environment.TOKEN, ray_environment.ONE_HOST):
        monkeypatch.setenv(name, "")  # noted, so that it is as before afterwards
        monkeypatch.delenv(name)
    ray_environment.prepare(joining=False)
    assert os.environ[ray_environment.AUTH_MODE] == "token"
    assert len(os.environ[ray_environment.TOKEN]) == 64
    assert list(tmp_path.iterdir()) == []


def config(**transfer):
    return parse_config({"model": {"path": "unused"}, "transfer": transfer})


def settings(config):
    return config.transfer.backend_params["engine_config"]


def test_pages_come_in_by_the_interface_that_holds_the_hosts_address():
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert settings(bound(config(), "decode-0", "127.0.0.1")) == "NET_DEVICES=lo"


def test_settings_of_ucx_are_kept_and_its_devices_are_the_users_where_given():
    tcp = config(backend_params={"engine_config": "TLS=tcp"})
    assert settings(bound(tcp, "decode-0", "127.0.0.1")) == "NET_DEVICES=lo,TLS=tcp"
    own = config(backend_params={"engine_config": "TLS=tcp,NET_DEVICES=eth7"})
    assert bound(own, "decode-0", "127.0.0.1") == own


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'eth77'.*does not have; it has .*lo"):
        check_interface("eth77")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7; set transfer\.interface to one of"):
        interface_of("203.0.113.7")
