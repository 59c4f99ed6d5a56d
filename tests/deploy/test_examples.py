"""The files that ship as examples can be read, and say what the code understands."""

import re
from pathlib import Path

import pytest
import yaml

from sluice.deploy.cluster.placement import ROUTER
from sluice.deploy.commands import preflight
from sluice.deploy.commands.prose import paragraphs
from sluice.deploy.commands.recall import recall_task
from sluice.protocol.config import load_config, parse_config
from sluice.protocol.messages import Role

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGS = sorted((DEPLOY / "configs").glob("*.yaml"))
WITH_A_MODEL = [path for path in CONFIGS if path.stem != "smollm2"]  # nodes/test_smollm2.py has it
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "k8s/sluice.yaml").read_text()))
EXAMPLE = parse_config({"model": {"path": "m"}})


@pytest.mark.parametrize("path", WITH_A_MODEL, ids=lambda path: path.name)
def test_a_shipped_config_passes_every_check(path):
    config = load_config(path)
    preflight.check(
        config.model_copy(update={"router": config.router.model_copy(update={"port": 0})})
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_line_of_a_shipped_config_is_explained(path):
    lines = path.read_text().splitlines()
    keys = [line for line in lines if line.startswith("  ") and ":" in line.split("#")[0]]
    assert keys
    assert all("#" in line for line in keys)


def test_kubernetes_pods_offer_the_roles_that_placement_asks_for():
    job = next(document for document in KUBERNETES if document["kind"] == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for role in Role:
        assert f'\\"{role}\\"' in groups[role]["rayStartParams"]["resources"]
    assert f'\\"{ROUTER}\\"' in cluster["headGroupSpec"]["rayStartParams"]["resources"]


def test_the_config_for_kubernetes_is_valid_and_wants_api_keys():
    data = next(document for document in KUBERNETES if document["kind"] == "ConfigMap")["data"]
    config = parse_config(yaml.safe_load(data["config.yaml"]))
    assert config.router.api_keys_file is not None
    assert config.ray.address == "auto"


def test_nobody_but_the_pods_reaches_them_on_more_than_the_api_and_the_dashboard():
    policy = next(document for document in KUBERNETES if document["kind"] == "NetworkPolicy")
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    job = next(document for document in KUBERNETES if document["kind"] == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert chosen <= group["template"]["metadata"]["labels"].items()
    own, *others = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": dict(chosen)}}]}
    assert [port["port"] for rule in others for port in rule["ports"]] == [8000, 8265]


def test_every_key_that_the_page_on_security_names_is_one_of_the_config():
    text = (DEPLOY.parent / "docs/security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(model|router|transfer|ray)\.(\w+)`", text))
    assert {("transfer", "interface"), ("router", "prefix_secret")} <= named
    for section, key in named:
        assert key in type(getattr(EXAMPLE, section)).model_fields, f"{section}.{key}"


def test_the_ray_cluster_file_starts_every_role_with_a_token():
    cluster = yaml.safe_load((DEPLOY / "ray/cluster.yaml").read_text())
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert all(command.startswith("RAY_AUTH_MODE=token ray start") for command in commands)
    assert {"cluster_name", "provider", "auth"} <= set(cluster)
    [install] = cluster["setup_commands"]
    assert install.split()[-1] in cluster["file_mounts"], "what is installed is what was copied"


def test_the_novel_is_whole_paragraphs_of_plain_text():
    text = "\n".join(paragraphs())
    assert text.startswith("PERSUASION\nby Jane Austen (1818)\nChapter 1\nSir Walter Elliot")
    assert text.isascii()
    assert 40_000 < len(text) < 60_000


def test_a_recall_task_states_its_code_once_and_where_it_was_told_to(rng):
    task = recall_task(rng, words_before=50, words_after=100)
    before, _, after = task.document.partition(task.fact)
    num_facts = [part.count("The secret code:") for part in (before, after)]
    assert sum(num_facts) == 3
    assert len(before.split()) == 50 + 5 * num_facts[0]
    assert len(after.split()) == 100 + 5 * num_facts[1]
    assert task.is_right(f" {task.code}.")
