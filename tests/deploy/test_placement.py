"""Where processes go, and what Ray's errors become on their way to the router."""

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from sluice.deploy.cluster import errors as ray_errors
from sluice.deploy.cluster.placement import (
    HostResources,
    check_gpus,
    demand_of,
    node_options,
    router_options,
    unplaced_roles,
    what_is_missing,
)
from sluice.protocol.config import RoleConfig, parse_config
from sluice.protocol.messages import ConfigError, NodeError, NodeLost, Refused, Role


def test_a_role_goes_to_the_hosts_that_offer_it():
    cluster = {"CPU": 8.0, "prefill": 2.0, "router": 1.0}
    assert node_options(Role.PREFILL, RoleConfig(), cluster)["resources"] == {"prefill": 1.0}
    assert router_options(cluster)["resources"] == {"router": 1.0}
    assert unplaced_roles(cluster) == ["decode"]


def test_a_role_that_no_host_offers_is_placed_by_cpus_and_gpus_alone():
    options = node_options(Role.DECODE, RoleConfig(num_cpus=3, num_gpus=1), {"CPU": 8.0})
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (3, 1, {})


def test_too_few_gpus_are_counted_before_anything_waits_for_them():
    role = {"device": "cuda", "num_gpus": 2, "replicas": 1}
    config = parse_config({"model": {"path": "x"}, "prefill": role, "decode": role})
    check_gpus(config, {"GPU": 4.0})
    with pytest.raises(ConfigError, match=r"need 4 GPU\(s\).*this machine has 1"):
        check_gpus(config, {"GPU": 1.0})


def test_a_dead_or_unreachable_process_is_a_lost_node():
    for error in (ActorDiedError(), ActorUnavailableError("no answer", b"0" * 16)):
        lost = ray_errors.translate(error, "decode-0")
        assert isinstance(lost, NodeLost)
        assert "decode-0" in str(lost)


def test_an_error_of_ours_comes_through_as_it_was_raised():
    refused = Refused("no free pages")
    assert ray_errors.translate(RayTaskError("reserve", "trace", refused), "decode-0") is refused


def test_any_other_error_becomes_a_node_error_with_its_words():
    error = ray_errors.translate(RayTaskError("run", "trace", KeyError("swa")), "prefill-0")
    assert type(error) is NodeError
    assert "swa" in str(error)


def test_a_process_without_a_place_names_what_is_short_on_which_host_and_the_way_out():
    cluster = {"CPU": 2.0, "decode": 1.0}
    demand = demand_of(node_options(Role.DECODE, RoleConfig(num_cpus=2), cluster))
    full = HostResources("10.0.0.1", cluster, {"CPU": 1.0, "decode": 1.0})
    without = HostResources("10.0.0.2", {"CPU": 1.0}, {"CPU": 1.0})
    words = what_is_missing(Role.DECODE, demand, [full, without])
    assert "needs 2 CPU and 1 decode; 10.0.0.1 has 1 of 2 CPU free." in words
    assert "decode.num_cpus" in words and """--resources '{"decode": N}'""" in words
    assert "GPU" not in words and "10.0.0.2" not in words


def test_hosts_that_all_lack_a_resource_are_all_named():
    demand = demand_of(node_options(Role.PREFILL, RoleConfig(num_gpus=1), {}))
    hosts = [HostResources(f"10.0.0.{n}", {"CPU": 1.0}, {"CPU": 1.0}) for n in (1, 2)]
    words = what_is_missing(Role.PREFILL, demand, hosts)
    assert "10.0.0.1 has 0 of 0 GPU free; 10.0.0.2 has 0 of 0 GPU free" in words
    assert "prefill.num_gpus" in words


def test_nothing_is_missing_where_a_host_has_room():
    free = HostResources("10.0.0.1", {"CPU": 4.0, "router": 1.0}, {"CPU": 1.0, "router": 1.0})
    demand = demand_of(router_options(free.total))
    assert what_is_missing("router", demand, [free]) == ""
