"""The processes of a run that a rank can find on its host, for faults: its agent, its raylet, and what is below and beside that.

Runs in: a rank of a run with faults. Neither torch nor ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import psutil

from raydist.ipc import AGENT_PID
from raydist.worker.faults import InjectedError

_ACTORS = {"coordinator": "ray::Coordinator", "monitor": "ray::RunMonitor"}


def find(name: str, fault: str) -> psutil.Process:
    """The agent, raylet, coordinator, monitor or gcs, for that fault. Raises InjectedError if it is not on this host, or cannot be
    told from others.
    """
    if AGENT_PID not in os.environ:
        raise InjectedError(f"{fault}: this rank has no agent")
    agent = psutil.Process(int(os.environ[AGENT_PID]))
    if name == "agent":
        return agent
    parents = agent.parents()
    # The workers of a private Ray are forked from a child of the driver, as its raylet is (cluster/ray_worker.py).
    beside = (child for parent in parents for child in parent.children())
    raylet = next((p for p in (*parents, *beside) if _read(p.name) == "raylet"), None)
    if raylet is None:
        raise InjectedError(f"{fault}: neither a parent process of this rank nor a process beside one is a raylet")
    if name == "raylet":
        return raylet
    if name == "gcs":
        above = raylet.parent()
        found = [p for p in above.children() if _read(p.name) == "gcs_server"] if above is not None else []
        where = "only a private Ray has it beside the raylet"
    else:
        actors = {*raylet.children(), *parents[0].children()}
        found = [p for p in actors if " ".join(_read(p.cmdline)).startswith(_ACTORS[name])]
        where = "it is on the driver's node, and found only if no other run has one there"
    if len(found) != 1:
        raise InjectedError(f"{fault}: process: {name}: {len(found)} of them were found here; {where}")
    return found[0]


def _read(of: Callable[[], Any]) -> Any:
    """A process's name or command line; "" if it has just exited: idle workers of Ray do at any time."""
    try:
        return of()
    except psutil.NoSuchProcess:
        return ""


def suspend(process: psutil.Process, seconds: float) -> None:
    """Stops it. A process of its own, which outlives this rank, continues it."""
    script = f"sleep {seconds}; kill -CONT {process.pid}"
    nowhere = subprocess.DEVNULL
    subprocess.run(
        ["setsid", "--fork", "sh", "-c", script], stdin=nowhere, stdout=nowhere, stderr=nowhere, check=True, cwd="/"
    )
    process.suspend()


def kill_node(fault: str) -> None:
    """Kills this rank's raylet and all below it, this process too."""
    raylet = find("raylet", fault)
    # All are stopped before any is killed: none starts another one that is not in the list, or reports an exit. The parents of this
    # process are killed last, and are not stopped. The uppermost is the first of them: the kernel ends all below it.
    raylet.suspend()
    parents = [p for p in psutil.Process().parents() if raylet in p.parents()]
    others: set[psutil.Process] = set()
    while new := set(raylet.children(recursive=True)) - others - {psutil.Process(), *parents}:
        others |= new
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
    for process in (*others, raylet, *reversed(parents)):
        with contextlib.suppress(psutil.NoSuchProcess):  # some exit with others
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
