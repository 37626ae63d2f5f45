"""Cost of a node monitor: processor time of one reading, and of its process at one reading per second, compared with an idle actor.

    python benchmarks/agent.py [--seconds 60] [--ranks 8]

The ranks are simulated by files in the mailbox, all with this process's id. It reads this machine's GPUs, if there are any.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist.ipc import mailbox
from raydist.ipc.mailbox import Mailbox
from raydist.observe.hardware.host import process
from raydist.observe.node_monitor import NodeMonitor
from raydist.run import telemetry_schema

READINGS = 200


class Idle:
    """An actor that does nothing."""

    def pid(self) -> int:
        """The id of its process."""
        return os.getpid()


class Sink(Idle):
    """Takes rows and drops them."""

    def observe(self, rows: list[dict[str, Any]], sent: float) -> None:
        """Like the run monitor's method."""


class Agent(NodeMonitor, Idle):  # type: ignore[misc]
    """The real node monitor."""


def tell(boards: list[Mailbox]) -> None:
    """Writes a row with all columns for each rank."""
    for rank, place in enumerate(boards):
        row = dict.fromkeys(telemetry_schema.RANK, 123456789) | {
            "monotonic": time.monotonic(),
            "rank": rank,
            "attempt": 1,
            "step": 7,
        }
        place.write({**row, "pid": os.getpid()})


def reading(folder: str, boards: list[Mailbox]) -> dict[str, float]:
    """Processor time in ms, and bytes sent, of one reading."""
    monitor = SimpleNamespace(observe=SimpleNamespace(remote=lambda rows, sent: None))
    agent = NodeMonitor(folder, "127.0.0.1", monitor, 3600.0, folder)
    agent.note()
    spent, rows = 0.0, []
    for _ in range(READINGS):
        tell(boards)
        begun = time.process_time()
        rows = agent.read()
        spent += time.process_time() - begun
    return {"reading_ms": spent / READINGS * 1e3, "rows": len(rows), "message_bytes": len(pickle.dumps(rows))}


def whole(folder: str, boards: list[Mailbox], seconds: float) -> dict[str, float]:
    """Share of a core that the node monitor's process and an idle actor use."""
    import ray

    ray.init(address="local", num_cpus=1, log_to_driver=False, include_dashboard=False)
    sink = ray.remote(Sink).options(num_cpus=0).remote()
    idle = ray.remote(Idle).options(num_cpus=0).remote()
    agent = ray.remote(Agent).options(num_cpus=0).remote(folder, "127.0.0.1", sink, 1.0, folder)
    ray.get(agent.note.remote())
    pids = ray.get([agent.pid.remote(), idle.pid.remote()])

    def spent() -> list[float]:
        return [process(pid)["cpu_seconds"] for pid in pids]

    before, end = spent(), time.monotonic() + seconds
    while time.monotonic() < end:
        tell(boards)
        time.sleep(1.0)
    shares = [(after - start) / seconds for after, start in zip(spent(), before, strict=True)]
    found = dict(zip(("agent_share", "idle_share"), shares, strict=True)) | {
        "agent_rss_mb": process(pids[0])["rss_bytes"] / 1e6,
        "idle_rss_mb": process(pids[1])["rss_bytes"] / 1e6,
    }
    ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=8)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        boards = [Mailbox(folder, "127.0.0.1", rank) for rank in range(asked.ranks)]
        try:
            tell(boards)
            found = reading(folder, boards) | whole(folder, boards, asked.seconds)
        finally:
            mailbox.clear(folder, "127.0.0.1")
    print(write("agent", {"ranks": asked.ranks, "seconds": asked.seconds, **found}).read_text())


if __name__ == "__main__":
    main()
