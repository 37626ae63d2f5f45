"""The rank's process: receives its order from the agent, trains, and reports how it ended.

Runs in: a child process of each Ray Train worker. Imports torch, never ray: the agent (launch/agent.py) calls Ray for it.

    agent --order--> rank --push, durable, ended--> agent        one socket, JSON, one call and its answer at a time
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from raydist.errors import RaydistError
from raydist.ipc.heartbeat import Heartbeat
from raydist.ipc.stack_dump import answer
from raydist.launch.script import Script, ScriptRank
from raydist.records import Event
from raydist.redact import redact
from raydist.worker.metrics.startup_timing import Startup


class Agent:
    """The rank's connection to its agent: `agent("push", records=...)` returns the agent's answer. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def __call__(self, what: str, **data: Any) -> Any:
        """Sends a call, and waits for its answer. Raises ConnectionError with the agent's error."""
        with self._lock:
            self._connection.send_bytes(json.dumps({"what": what, **data}).encode())
            answer = json.loads(self._connection.recv_bytes())
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return answer["value"]


def run(calls: int, control: int, stacks: int, heartbeat: int, output: int) -> int:
    """Runs one attempt on this rank; the arguments are descriptors. Returns 0 if the agent has the result, also an error."""
    _print_to(output)
    faulthandler.enable()  # on a segfault, the stack is in the worker's log
    answer(stacks, socket.socket(fileno=control))
    connection = Connection(calls)
    order = json.loads(connection.recv_bytes())
    agent = Agent(connection)

    def tell(stage: str) -> None:
        with contextlib.suppress(OSError, EOFError):  # for display only: training does not depend on it
            agent("stage", name=stage)

    watched = {"tell": tell} if order["rank"] == 0 else {}
    startup = Startup(order["begun"], order["incident"], order["before"], **watched)
    startup.done("schedule")
    script = Script(**order["script"]) if order["script"] is not None else None
    try:
        reached = Heartbeat(heartbeat, order["spec"]["recovery"]["step_timeout"])
        ended = {"outcome": train(order, agent, reached, startup, script)}
    except BaseException as error:
        place = script.place(error) if script is not None else ""
        ended = {"error": {**facts(error, order["rank"], place), "stage": startup.doing}}
    agent("ended", **ended)
    return 0


def _print_to(fd: int) -> None:
    """Redirects this process's output to the agent, line by line: raydist/launch/rank_output.py."""
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def train(
    order: dict[str, Any], agent: Agent, heartbeat: Heartbeat, startup: Startup, script: Script | None
) -> dict[str, Any]:
    """Returns the loop's outcome as plain data, or that of `script`. `order`: the supervisor's order for all ranks, with `rank` and
    `node_ip`.
    """
    from raydist.run.directory import RunDir, await_attempt
    from raydist.spec import parse
    from raydist.worker import distributed, model_transforms
    from raydist.worker.attempt import Job, MonitorChannel
    from raydist.worker.checkpoint.memory_manager import MemoryStoreJob
    from raydist.worker.loop import train

    startup.done("import")
    spec, run = parse(order["spec"]), RunDir(order["run"])
    # Before anything is read as if this were a new run, or is written.
    await_attempt(run, order["attempt"], first=order["rank"] == 0)
    rank = distributed.start(
        gpus=order["gpus"],
        threads=max(1, int(spec.cluster.cpus_per_worker)),
        timeout_s=spec.recovery.timeout_s,
        node_ip=order["node_ip"],
    )
    startup.done("rendezvous")
    job = Job(
        spec=spec,
        run=run,
        dataset=order["dataset"],
        attempt=order["attempt"],
        until=order["until"],
        allow_spec_change=order["allow_spec_change"],
        faults=order["faults"],
        memory_store=MemoryStoreJob(**order["memory_store"]) if order["memory_store"] is not None else None,
        agent=agent,
    )

    def push(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(agent("push", records=records, events=events, sent=time.time()))

    def durable() -> None:
        agent("durable")

    def tell(event: Event) -> None:  # in a thread, so that training does not wait for the monitor
        data = {"records": [], "events": [event.to_dict()], "sent": time.time()}
        threading.Thread(target=agent, args=("push",), kwargs=data, name="raydist-tell", daemon=True).start()

    model_transforms.on_compile(heartbeat.compiling)
    channel = MonitorChannel(push, durable) if rank.first else None
    body = (lambda *parts: script.run(ScriptRank(*parts))) if script is not None else None
    outcome = train(job, rank, channel, heartbeat, startup, tell, body)
    distributed.stop(rank)
    return outcome.to_dict()


def facts(error: BaseException, rank: int, place: str = "") -> dict[str, Any]:
    """An error as plain data: the fields of raydist.errors.RankFailed. `place`: the line of the user's script that raised it."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        error = RuntimeError(f"the train function ended with {type(error).__name__}: {error}")
    ours = isinstance(error, RaydistError)
    message = (
        "; ".join(filter(None, (error.message, error.hint)))
        if isinstance(error, RaydistError)
        else redact(str(error).strip())
    )
    return {
        "rank": rank,
        "type_name": type(error).__name__,
        "message": f"{place}: {message}" if place else message,
        # raydist's own errors name the place and the remedy; other errors need the traceback.
        "traceback": "" if ours else redact("".join(traceback.format_exception(error))),
        "at": time.time(),
        "bases": [c.__name__ for c in type(error).__mro__],
    }
