"""The official OpenAI client's sessions of `make test-clients`, over real nodes in this process."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from sluice.protocol.config import load_config
from sluice.router.http.server import serve

ROOT = Path(__file__).parents[2]
SESSIONS = ROOT / "tests/clients/sessions"
CONFIG = ROOT / "deploy/configs/v4chat.yaml"
LIMIT_S = 120


@pytest.mark.parametrize("file", ["openai_chat.py", "openai_responses.py"])
async def test_a_clients_sessions_all_end_well(start_local, router_over, file):
    config = load_config(CONFIG)
    server = await serve(router_over(start_local(config)), "127.0.0.1", 0)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SESSIONS / file), server.url, config.model.served_name,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        told, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        await server.stop(limit_s=0)
    outcomes = json.loads(told.decode().splitlines()[-1].removeprefix("OUTCOMES "))
    assert set(outcomes.values()) == {"ok"} and len(outcomes) == 5, outcomes
