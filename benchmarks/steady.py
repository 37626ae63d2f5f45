"""Steady tokens/s of one command relative to another, measured alternately in windows of 5 s.

    python benchmarks/steady.py [--rounds 16] [--group plain|sharded] [--only NAME] [--deepspeed PYTHON]

plain: `raydist train` and plain Ray Train over plain torchrun + DDP. sharded: zero2 and zero3 over plain torchrun + FSDP2 at the
same reshard setting, and over DeepSpeed, if you give an interpreter that has it (0.19.8 and ninja, on the same torch).
The costs of memory checkpoints and of monitoring are too small to see between two runs: snapshot.py and watching.py measure them.

peers.py compares whole runs of about 30 s, one after another: if the machine's speed drifts by more than the difference to
measure, that takes many rounds. Here two peers are alive at the same time and train alternately, while all processes of the other
one are stopped (SIGSTOP). A ratio is a window of the peer over the mean of its base's windows before and after it. The model,
batch and threads are the same as in peers.py; each peer has its own base process. The first 0.6 s of a window do not count.

The result is the median ratio, with a 95% interval from order statistics, because single windows on a shared machine are outliers.
If the interval is too wide, compare the processor time per step of all of a peer's processes: other load affects it little.

A raydist run is stopped for less time than its timeout for lost workers (8 s).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import psutil
from common import write
from peer_model import ENDLESS
from peers import PEERS, TOKENS, command

T = TypeVar("T")
WINDOW_S, SETTLE_S, WARM = 5.0, 0.6, 25
GROUPS = {
    "plain": [("ray train", "torchrun"), ("raydist", "torchrun"), ("raydist (plain AdamW)", "torchrun")],
    "sharded": [
        ("raydist zero2", "torchrun FSDP2 zero2"),
        ("raydist zero3", "torchrun FSDP2 zero3"),
        ("raydist zero2", "DeepSpeed zero2"),
        ("raydist zero3", "DeepSpeed zero3"),
    ],
}
"""(peer, base) pairs."""
RESULTS = {"plain": "steady", "sharded": "steady_sharded"}


class Window(NamedTuple):
    """Steps/s of rank 0, and processor seconds of all processes per step."""

    pace: float
    processor: float


class Peer:
    """A running peer; its processes are stopped except in its windows."""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self._name, self._out = name, folder / name.replace(" ", "-")
        asked = command(name, str(self._out), ENDLESS, str(self._out), python)
        if "raydist" in name:
            asked += ["--set", "train.steps=1000000"]
        env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        env.pop("RAY_ADDRESS", None)
        self._log = (folder / f"{self._out.name}.log").open("w")
        self._process = subprocess.Popen(asked, cwd=PEERS, env=env, stdout=self._log, stderr=self._log)

    def warm(self) -> None:
        """Waits until it trains."""
        while len(self._forwards()) < WARM:
            if self._process.poll() is not None:
                sys.exit(f"{self._name} has ended:\n{Path(self._log.name).read_text()[-3000:]}")
            time.sleep(0.2)

    def window(self) -> Window:
        """Lets it train for one window and measures it."""
        self.go()
        time.sleep(SETTLE_S)
        begun, spent = time.time(), self._spent()
        time.sleep(WINDOW_S - SETTLE_S)
        end, spent = time.time(), self._spent() - spent
        self.stop()
        inside = [at for at in self._forwards() if begun <= at <= end]
        pace = (len(inside) - 1) / (inside[-1] - inside[0])
        return Window(pace, spent / (pace * (end - begun)))

    def go(self) -> None:
        """Resumes its processes."""
        self._each(psutil.Process.resume)

    def stop(self) -> None:
        """Stops its processes."""
        self._each(psutil.Process.suspend)

    def end(self) -> None:
        """Kills all its processes."""
        self._each(psutil.Process.kill)
        self._process.wait()
        self._log.close()

    def _each(self, method: Callable[[psutil.Process], T]) -> list[T]:
        found = []
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            for process in [top, *top.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    found.append(method(process))
        return found

    def _spent(self) -> float:
        return sum(times.user + times.system for times in self._each(psutil.Process.cpu_times))

    def _forwards(self) -> list[float]:
        path = Path(f"{self._out}.0.forwards")
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def pair(name: str, base: str, rounds: int, python: str) -> tuple[list[Window], list[Window]]:
    """Alternate windows of the base and of the peer; the base has the first and the last one."""
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer(each, Path(folder), python if "DeepSpeed" in each else sys.executable) for each in (base, name)]
        bases: list[Window] = []
        others: list[Window] = []
        try:
            for peer in peers:  # none is stopped before both train: starting takes longer than a peer may be stopped
                peer.warm()
            for peer in peers:
                peer.stop()
            for _ in range(rounds):
                # Always in this order: after two windows in a row, the other one would have been stopped for too long.
                bases.append(peers[0].window())
                others.append(peers[1].window())
            bases.append(peers[0].window())
        finally:
            for peer in reversed(peers):
                peer.end()
    return bases, others


def interval(ratios: list[float]) -> dict[str, Any]:
    """The median and its 95% interval from order statistics, valid for any distribution."""
    ordered, n = sorted(ratios), len(ratios)
    below = [
        sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n)
    ]  # probability that at most k of n are below the median
    cut = max((k for k in range(n // 2) if below[k] <= 0.025), default=0)
    return {"ratio": statistics.median(ratios), "low": ordered[cut], "high": ordered[-1 - cut], "ratios": ratios}


def main() -> None:
    """Runs, prints the table, writes the group's file in results/."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--group", choices=GROUPS, default="plain")
    parser.add_argument("--only", metavar="NAME", help="only this peer or base; writes no results")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has DeepSpeed")
    options = parser.parse_args()
    result = {}
    print(f"{'':40s} {'tokens/s':>9s} {'ratio':>27s} {'processor time a step':>27s}")
    for name, base in GROUPS[options.group]:
        if (options.only and options.only not in (name, base)) or ("DeepSpeed" in base and not options.deepspeed):
            continue
        bases, others = pair(name, base, options.rounds, options.deepspeed)
        beside = list(zip(others, pairwise(bases), strict=True))
        row = {
            "tokens_per_second": statistics.median(window.pace for window in others) * TOKENS,
            "pace": interval([2 * own.pace / (before.pace + after.pace) for own, (before, after) in beside]),
            "processor": interval([2 * own.processor / (a.processor + b.processor) for own, (a, b) in beside]),
        }
        shown = [f"{x['ratio']:.3f} ({x['low']:.3f} to {x['high']:.3f})" for x in (row["pace"], row["processor"])]
        print(f"{name + ' / ' + base:40s} {row['tokens_per_second']:9.0f} {shown[0]:>27s} {shown[1]:>27s}", flush=True)
        result[f"{name} / {base}"] = row
    if not options.only:
        print(
            write(
                RESULTS[options.group],
                {"window_s": WINDOW_S, "rounds": options.rounds, "pairs": result},
            )
        )


if __name__ == "__main__":
    main()
