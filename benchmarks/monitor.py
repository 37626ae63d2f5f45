"""What a RunMonitor takes of a core to hold a large run: 1,000 simulated ranks that are read once a second.

    python benchmarks/monitor.py [--ranks 1000] [--seconds 120]

One process with a RunMonitor, as its actor has it, and its thread that writes Parquet every 2 s to a real disk and asks the rules
of raydist.diagnosis. Each second it is given the rows of all nodes, of 8 GPUs and 8 ranks each: the values of a real row, made
larger from row to row. Printed: the share of a core that this process takes for it, less what making the rows takes, the longest
call, and how resident memory grew over the second half.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from raydist.observe.run import RunMonitor
from raydist.samplelog import is_counter, read_samples
from raydist.samples import GPU, NODE, RANK

A_NODE = 8


def values(columns: dict[str, Any], tick: int, subject: int) -> dict[str, Any]:
    """A row's: counters grow, readings stand."""
    made: dict[str, Any] = {}
    for i, (name, (kind, _)) in enumerate(columns.items()):
        if str(kind) == "string":
            made[name] = "x"
        else:
            value = (i + 1) * 1000 + subject + (tick * 37 if is_counter(name) else 0)
            made[name] = float(value) if str(kind) == "double" else value
    return made


def batches(ranks: int, tick: int, at: float) -> Iterator[list[dict[str, Any]]]:
    """Of each node, its rows."""
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


def main() -> None:
    """Runs, prints, writes results/monitor.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=120)
    options = parser.parse_args()
    me = psutil.Process()
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        monitor = RunMonitor(f"{folder}/run", exporters=[])
        monitor.begin_attempt(1, options.ranks, 0)
        making, longest, rss = 0.0, 0.0, []
        begun, cpu = time.monotonic(), time.process_time()
        for tick in range(options.seconds):
            made_from = time.thread_time()
            told = list(batches(options.ranks, tick, time.time()))
            making += time.thread_time() - made_from
            for rows in told:
                call = time.monotonic()
                monitor.observe(rows)
                longest = max(longest, time.monotonic() - call)
            rss.append(me.memory_info().rss)
            time.sleep(max(0.0, begun + tick + 1 - time.monotonic()))
        wall = time.monotonic() - begun
        share = (time.process_time() - cpu - making) / wall
        monitor.end("finished")
        kept = read_samples(monitor._run, ["at"]).num_rows
    given = options.seconds * (options.ranks * 2 + options.ranks // A_NODE)
    grown = (rss[-1] - rss[len(rss) // 2]) / 2**20
    result = {
        "ranks": options.ranks,
        "seconds": options.seconds,
        "wall_s": wall,
        "core_share": share,
        "longest_call_s": longest,
        "rows_given": given,
        "rows_kept": kept,
        "rss_mib": rss[-1] / 2**20,
        "rss_grown_mib": grown,
    }
    print(f"{options.ranks} ranks, {given / options.seconds:.0f} rows a second for {wall:.0f} s: {share:.2f} of a core")
    memory = f"resident {rss[-1] / 2**20:.0f} MiB, {grown:+.0f} MiB in the second half"
    print(f"longest call {1e3 * longest:.0f} ms; {kept} of {given} rows stored; {memory}")
    print(write("monitor", result))


if __name__ == "__main__":
    main()
