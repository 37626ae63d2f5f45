"""The CPU share and memory of a RunMonitor for a large run: 1,000 simulated ranks with one reading per second.

    python benchmarks/monitor.py [--ranks 1000] [--seconds 120] [--tree]

One process has a RunMonitor, as in its actor, with its thread that writes Parquet to a real disk every 2 s and evaluates the rules
of raydist.diagnosis. Every second it gets the rows of all nodes, with 8 GPUs and 8 ranks each; values increase from row to row.
Printed: the share of a core that this process uses, without the time for making the rows; the longest call; and the growth of
resident memory over the second half.

--tree: as on a cluster, the first 64 nodes send to the monitor, and each further 64 nodes to an aggregator, an actor on one of
them. Measured one after the other: the monitor, which gets the newest rows of all other nodes every 10 s, and one such
aggregator. Neither includes Ray's time to transfer the rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist.observe.aggregator import HAND_ON_S, NODES, Aggregator
from raydist.observe.run_monitor import RunMonitor
from raydist.run.directory import RunDir, begin_attempt
from raydist.run.telemetry_log import read_samples
from raydist.run.telemetry_schema import GPU, NODE, RANK, is_total

A_NODE = 8


def values(columns: dict[str, Any], tick: int, subject: int) -> dict[str, Any]:
    """The values of a row: counters increase, other readings stay constant."""
    made: dict[str, Any] = {}
    for i, (name, (kind, _)) in enumerate(columns.items()):
        if str(kind) == "string":
            made[name] = "x"
        else:
            value = (i + 1) * 1000 + subject + (tick * 37 if is_total(name) else 0)
            made[name] = float(value) if str(kind) == "double" else value
    return made


def batches(ranks: int, tick: int, at: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each node."""
    for node in range(ranks // A_NODE):
        who = {"at": at, "host": f"h{node}", "node": f"10.0.{node // 256}.{node % 256}"}
        rows = [{**who, "kind": "node", **values(NODE, tick, node)}]
        for local in range(A_NODE):
            rank = node * A_NODE + local
            rows.append({**who, "kind": "gpu", "gpu": local, "rank": rank, **values(GPU, tick, rank)})
            rows.append(
                {
                    **who,
                    "kind": "rank",
                    "rank": rank,
                    "gpu": local,
                    "attempt": 1,
                    "step": tick + 1,
                    **values(RANK, tick, rank),
                }
            )
        yield rows


@dataclass(frozen=True)
class Held:
    """The cost for `ranks` ranks: share of a core, longest call, resident memory and its growth in the second half."""

    ranks: int
    core_share: float
    longest_call_s: float
    rss_mib: float
    rss_grown_mib: float

    def __str__(self) -> str:
        memory = f"resident {self.rss_mib:.0f} MiB, {self.rss_grown_mib:+.0f} MiB in the second half"
        return f"{self.ranks} ranks: {self.core_share:.2f} of a core, longest call {1e3 * self.longest_call_s:.0f} ms; {memory}"


def held(
    give: Callable[[list[dict[str, Any]]], None],
    ranks: int,
    seconds: int,
    beside: Callable[[int], float] = lambda tick: 0.0,
) -> Held:
    """Calls `give` with the rows of each node every second. `beside(tick)` does other work; returns the time to make its rows."""
    me, rss = psutil.Process(), []
    making, longest = 0.0, 0.0
    begun, cpu = time.monotonic(), time.process_time()
    for tick in range(seconds):
        made_from = time.thread_time()
        made = list(batches(ranks, tick, time.time()))
        making += time.thread_time() - made_from + beside(tick)
        for rows in made:
            call = time.monotonic()
            give(rows)
            longest = max(longest, time.monotonic() - call)
        rss.append(me.memory_info().rss / 2**20)
        time.sleep(max(0.0, begun + tick + 1 - time.monotonic()))
    share = (time.process_time() - cpu - making) / (time.monotonic() - begun)
    return Held(ranks, share, longest, rss[-1], rss[-1] - rss[len(rss) // 2])


def main() -> None:
    """Runs, prints, writes results/monitor.json, or results/monitor_tree.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--tree", action="store_true")
    options = parser.parse_args()
    near = min(options.ranks, NODES * A_NODE) if options.tree else options.ranks
    far = options.ranks - near
    found = {}
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        begin_attempt(RunDir(f"{folder}/run"), 1)
        monitor = RunMonitor(f"{folder}/run", exporters=[])
        monitor.begin_attempt(1, options.ranks, 0)

        def hand_on(tick: int) -> float:
            begun = time.thread_time()
            told = list(batches(far, tick, time.time())) if far and tick % int(HAND_ON_S) == 0 else []
            making = time.thread_time() - begun
            for rows in told:
                monitor.export(rows)
            return making

        found["monitor"] = held(monitor.observe, near, options.seconds, hand_on)
        if far:
            push, export = SimpleNamespace(remote=monitor.push), SimpleNamespace(remote=monitor.export)
            aggregator = Aggregator(f"{folder}/run", 1, SimpleNamespace(push=push, export=export))
            found["aggregator"] = held(aggregator.observe, NODES * A_NODE, options.seconds)
            aggregator.close()
        monitor.end("finished")
        kept = read_samples(monitor._run, ["at"]).num_rows
    given = sum(options.seconds * (each.ranks * 2 + each.ranks // A_NODE) for each in found.values())
    for name, each in found.items():
        print(f"{name}, {each}")
    aggregators = -(-far // (NODES * A_NODE))
    print(f"{options.ranks} ranks, {aggregators} aggregators; {kept} of {given} rows stored")
    result = {"ranks": options.ranks, "seconds": options.seconds, "aggregators": aggregators}
    result |= {"rows_given": given, "rows_kept": kept, **{name: asdict(each) for name, each in found.items()}}
    print(write("monitor_tree" if options.tree else "monitor", result))


if __name__ == "__main__":
    main()
