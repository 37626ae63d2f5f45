"""Steady tokens/s of `raydist train` and of plain Ray Train over plain torchrun + DDP, side by side in windows of 5 s.

    python benchmarks/steady.py [--rounds 25]

peers.py compares runs, one after another, each some 30 s long: on a machine whose speed drifts by more than the difference that
is looked for, that takes many rounds. Here two peers are alive at the same time, and in turn one trains while all processes of
the other are stopped (SIGSTOP): a window of the peer over the mean of torchrun's before and after it is a ratio. The model,
batch and threads are those of peers.py; each peer is paired with a torchrun of its own. A window's first 0.6 s are left out.

A run of raydist is stopped for less time than it takes it to call a worker lost (8 s).
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
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import psutil
from common import write
from peer_model import ENDLESS
from peers import PEERS, TOKENS, command

WINDOW_S, SETTLE_S, WARM = 5.0, 0.6, 25
BESIDE = ["ray train", "raydist", "raydist (plain AdamW)"]


class Peer:
    """One peer, alive and, but in its windows, stopped."""

    def __init__(self, name: str, folder: Path) -> None:
        self._out = folder / name.replace(" ", "-")
        asked = command(name, str(self._out), ENDLESS, str(folder), sys.executable)
        if "raydist" in name:
            asked += ["--set", "train.steps=1000000"]
        env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        env.pop("RAY_ADDRESS", None)
        self._log = (folder / f"{self._out.name}.log").open("w")
        self._process = subprocess.Popen(asked, cwd=PEERS, env=env, stdout=self._log, stderr=self._log)
        while len(self._forwards()) < WARM:
            if self._process.poll() is not None:
                sys.exit(f"{name} has ended:\n{Path(self._log.name).read_text()[-3000:]}")
            time.sleep(0.2)
        self._stop()

    def window(self) -> float:
        """Steps a second of rank 0, in one window."""
        self._signal(psutil.Process.resume)
        time.sleep(SETTLE_S)
        begin = time.time()
        time.sleep(WINDOW_S - SETTLE_S)
        end = time.time()
        self._stop()
        inside = [at for at in self._forwards() if begin <= at <= end]
        return (len(inside) - 1) / (inside[-1] - inside[0])

    def end(self) -> None:
        """All its processes are killed."""
        self._signal(psutil.Process.kill)
        self._process.wait()
        self._log.close()

    def _stop(self) -> None:
        self._signal(psutil.Process.suspend)

    def _signal(self, method: object) -> None:
        try:
            top = psutil.Process(self._process.pid)
            processes = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                method(process)  # type: ignore[operator]
            except psutil.NoSuchProcess:
                continue

    def _forwards(self) -> list[float]:
        path = Path(f"{self._out}.0.forwards")
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def pair(name: str, rounds: int) -> list[tuple[float, float]]:
    """(torchrun's, the peer's) steps a second, round by round; at the end torchrun's alone."""
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer("torchrun", Path(folder)), Peer(name, Path(folder))]
        found = []
        try:
            for _ in range(rounds):
                # Always in this order: twice in a row, and the other would be stopped for too long.
                found.append((peers[0].window(), peers[1].window()))
            found.append((peers[0].window(), math.nan))
        finally:
            for peer in reversed(peers):
                peer.end()
    return found


def main() -> None:
    """Runs, prints the table, writes results/steady.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=BESIDE, help="this one only; nothing is written")
    options = parser.parse_args()
    result = {}
    print(f"{'':24s} {'tokens/s':>9s} {'/torchrun':>9s} {'mean':>9s} {'+-':>9s}")
    for name in [options.only] if options.only else BESIDE:
        found = pair(name, options.rounds)
        ratios = [2 * theirs / (before + after) for (before, theirs), (after, _) in pairwise(found)]
        row = {
            "tokens_per_second": statistics.median(theirs for _, theirs in found[:-1]) * TOKENS,
            "over_torchrun": statistics.median(ratios),
            "mean": statistics.mean(ratios),
            "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5,
        }
        figures = [row["over_torchrun"], row["mean"], row["standard_error"]]
        print(f"{name:24s} {row['tokens_per_second']:9.0f} " + " ".join(f"{x:9.4f}" for x in figures), flush=True)
        result[name] = {**row, "ratios": ratios}
    if not options.only:
        print(write("steady", {"window_s": WINDOW_S, "rounds": options.rounds, "peers": result}))


if __name__ == "__main__":
    main()
