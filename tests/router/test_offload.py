"""Helper processes do what they are asked, and die of it alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest
import uvloop

from sluice.protocol.messages import InvalidRequest, QueueFull, Unavailable
from sluice.router.common.offload import GivenUp, Offload

MB = 1 << 20
LIMIT_S = 0.2
REFUSE = """
from sluice.protocol.messages import InvalidRequest
raise InvalidRequest("prompt: too blue", param="prompt")
"""


@contextlib.asynccontextmanager
async def offload(num_processes=1, max_bytes=64 * MB, max_waiting=8, **setup):
    helpers = Offload(num_processes, max_bytes=max_bytes, max_waiting=max_waiting, **setup)
    try:
        yield helpers
    finally:
        await helpers.close()


def has_ended(pidfd: int, limit_s: float) -> bool:
    """Whether the process ends in time; it need not be a child of ours."""
    return bool(select.select([pidfd], [], [], limit_s)[0])


async def test_a_helper_answers_with_the_value_and_keeps_its_process():
    async with offload() as helpers:
        pid = await helpers.run(os.getpid, limit_s=LIMIT_S)
        assert pid != os.getpid()
        assert await helpers.run(divmod, 17, 5, limit_s=LIMIT_S) == (3, 2)
        assert await helpers.run(os.getpid, limit_s=LIMIT_S) == pid


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ("while True: pass", "0.2 s of CPU time"),
        ("10 ** (10 ** 9)", "0.2 s of CPU time"),  # one operation, which holds the interpreter
        ("bytes(1 << 30)", "64 MB of memory"),
        ("import os; os.kill(os.getpid(), 11)", "status -11"),
        ("import os; os._exit(3)", "status 3"),
    ],
)
async def test_a_job_beyond_its_limits_costs_only_itself(job, why):
    async with offload() as helpers:
        pid = await helpers.run(os.getpid, limit_s=LIMIT_S)
        with pytest.raises(GivenUp, match=why):
            await helpers.run(exec, job, limit_s=LIMIT_S)
        assert await helpers.run(os.getpid, limit_s=LIMIT_S) != pid


async def test_the_event_loop_goes_on_meanwhile():
    async with offload() as helpers:
        job = asyncio.create_task(helpers.run(exec, "10 ** (10 ** 9)", limit_s=LIMIT_S))
        num_turns = 0
        while not job.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert num_turns > 20
        assert isinstance(job.exception(), GivenUp)


async def test_errors_of_ours_come_back_as_they_are():
    async with offload() as helpers:
        with pytest.raises(InvalidRequest, match="too blue") as error:
            await helpers.run(exec, REFUSE, limit_s=LIMIT_S)
        assert error.value.param == "prompt"


async def test_a_bug_in_a_job_comes_back_with_its_traceback():
    async with offload() as helpers:
        with pytest.raises(RuntimeError, match="KeyError: 'a bug'"):
            await helpers.run(exec, "raise KeyError('a bug')", limit_s=LIMIT_S)


async def test_nothing_but_plain_data_is_taken_from_a_helper():
    async with offload() as helpers:
        with pytest.raises(Exception, match="helper process"):
            await helpers.run(eval, "__import__('pathlib').Path('/')", limit_s=LIMIT_S)
        assert await helpers.run(abs, -1, limit_s=LIMIT_S) == 1


async def test_what_setup_refuses_start_raises_and_no_helper_is_left():
    async with offload(setup=exec, setup_args=(REFUSE,)) as helpers:
        with pytest.raises(InvalidRequest, match="too blue"):
            await helpers.start()
        with pytest.raises(Unavailable):
            await helpers.run(os.getpid, limit_s=LIMIT_S)


async def test_more_than_may_wait_are_refused_and_the_others_served(tmp_path):
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    async with offload(max_waiting=2) as helpers:
        await helpers.start()
        running = asyncio.create_task(helpers.run(eval, f"open({str(fifo)!r}).read()", limit_s=1))
        gate = await asyncio.to_thread(fifo.open, "w")  # the helper has opened its end
        waiting = [asyncio.create_task(helpers.run(abs, -n, limit_s=1)) for n in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await helpers.run(abs, -9, limit_s=1)
        gate.write("go")
        gate.close()
        assert await asyncio.gather(running, *waiting) == ["go", 0, 1]


async def test_a_cancelled_caller_costs_no_helper(tmp_path):
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    async with offload() as helpers:
        pid = await helpers.run(os.getpid, limit_s=1)
        running = asyncio.create_task(helpers.run(eval, f"open({str(fifo)!r}).read()", limit_s=1))
        gate = await asyncio.to_thread(fifo.open, "w")
        waiting = asyncio.create_task(helpers.run(abs, -1, limit_s=1))
        await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        gate.close()
        assert await helpers.run(os.getpid, limit_s=1) == pid


async def test_close_ends_what_runs():
    async with offload() as helpers:
        await helpers.start()
        job = asyncio.create_task(helpers.run(exec, "while True: pass", limit_s=60))
        await asyncio.sleep(0)
        await helpers.close()
        with pytest.raises(Unavailable):
            await job


def test_it_works_under_uvloop():
    async def work() -> int:
        async with offload(2) as helpers:
            await helpers.start()
            with pytest.raises(GivenUp):
                await helpers.run(exec, "while True: pass", limit_s=LIMIT_S)
            return sum(await asyncio.gather(*(helpers.run(abs, -n, limit_s=1) for n in range(8))))

    assert uvloop.run(work()) == 28


PARENT = f"""
import asyncio, os
from sluice.router.common.offload import Offload

async def main():
    helpers = Offload(2, max_bytes={64 * MB}, max_waiting=8)
    await helpers.start()
    idle, busy = [await helpers.run(os.getpid, limit_s=1) for _ in range(2)]
    job = asyncio.create_task(helpers.run(exec, "10 ** (10 ** 9)", limit_s=1))
    await asyncio.sleep(0)
    print(idle, busy, flush=True)
    await job

asyncio.run(main())
"""


def test_no_helper_outlives_a_parent_that_was_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    for pidfd in pidfds:
        assert has_ended(pidfd, limit_s=30.0)
        os.close(pidfd)
