"""Steady tokens/s and seconds to the first step: `raydist train` compared with plain torchrun + DDP and plain Ray Train.

    [PEER_STEPS=100] python benchmarks/peers.py [--rounds 5] [--sharded [--deepspeed PYTHON]]

The overhead of Ray's processes is smaller than the drift of a shared machine's speed between two runs: steady.py measures it. For
the seconds to the first step, a few steps are enough.

With --sharded: zero2 and zero3 compared with plain torchrun + FSDP2 at the same reshard setting; and with DeepSpeed, if you give
an interpreter that has it (0.19.8 and ninja, on the same torch).

Two gloo ranks of one thread each train the same model on batches of the same shape. Each run is a cold start; the peers run one
after another, in a rotated order each round. The model's forward measures the time, the same for all. A ratio divides a peer's
value by torchrun's of the same round; the table has the medians. `raydist (plain AdamW)` has optim.fused false, like the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
sys.path.insert(0, str(Path(__file__).parent))
from common import write
from peer_model import ENDLESS, STEPS, WARM

PEERS = Path(__file__).parent / "peers"
BIN = Path(sys.executable).parent
TOKENS = 2 * 8 * 128
REPLICATED = ["torchrun", "ray train", "raydist", "raydist (plain AdamW)"]
SHARDED = [
    "torchrun FSDP2 zero2", "raydist zero2", "raydist zero2 (plain AdamW)",
    "torchrun FSDP2 zero3", "raydist zero3", "raydist zero3 (plain AdamW)",
]  # fmt: skip


DEEPSPEED = ["DeepSpeed zero2", "DeepSpeed zero3"]
SCRIPTS = {"torchrun": "torchrun_ddp.py", "torchrun FSDP2": "torchrun_fsdp.py", "DeepSpeed": "deepspeed_zero.py"}


def command(peer: str, out: str, t0: float | str, storage: str, python: str = sys.executable) -> list[str]:
    """The command of one run. `t0`: its start time, or ENDLESS; `python`: interpreter of peers that are scripts under torchrun."""
    name, _, strategy = peer.rpartition(" zero")
    if script := SCRIPTS.get(name or peer):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
        return [*torchrun, script, out, str(t0), *([f"zero{strategy}"] if strategy != peer else [])]
    if peer == "ray train":
        return [sys.executable, "ray_train.py", out, str(t0)]
    extra = ["--set", "optim.fused=false"] if "plain" in peer else []
    strategy = next((word for word in peer.split() if word.startswith("zero")), "ddp")
    extra += ["--set", f"parallel.strategy={strategy}", "--set", f"train.steps={WARM + STEPS + 2}"]
    options = f"model.options={{out: {out}}}" if t0 == ENDLESS else f"model.options={{out: {out}, t0: {t0}}}"
    raydist = [str(BIN / "raydist"), "train", "job.yaml", "--fresh", "--storage", storage, "--address", "local"]
    return [*raydist, "--set", options, *extra]


def run(peer: str, storage: str, deepspeed: str | None) -> dict[str, float]:
    """One cold run: tokens/s, CPU ms per step (mean of the ranks), peak RSS (larger of the ranks), seconds to the first step."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    env.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory() as folder:
        out, t0 = f"{folder}/out", time.time()
        asked = command(peer, out, t0, storage, deepspeed if deepspeed and peer in DEEPSPEED else sys.executable)
        done = subprocess.run(asked, cwd=PEERS, env=env, capture_output=True, timeout=300)
        if done.returncode:
            sys.exit(f"{peer} failed:\n{done.stderr.decode()[-3000:]}")
        ranks = [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in (0, 1)]
    return {
        "tokens_per_second": TOKENS / max(r["step_ms"] for r in ranks) * 1e3,
        "cpu_ms": statistics.mean(r["cpu_ms"] for r in ranks),
        "rss_mb": max(r["rss_mb"] for r in ranks),
        "first_step_s": max(r["first_step_s"] for r in ranks),
        "wall_s": time.time() - t0,
    }


def main() -> None:
    """Runs, prints the table, writes results/peers.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sharded", action="store_true", help="ZeRO compared with FSDP2")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="with --sharded: an interpreter that has DeepSpeed")
    options = parser.parse_args()
    peers = SHARDED + (DEEPSPEED if options.deepspeed else []) if options.sharded else REPLICATED
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as storage:
        # The corpus is prepared once, before anything is timed.
        subprocess.run([*command("raydist", f"{storage}/warm", 0, storage), "--until", "1"], cwd=PEERS, check=True)
        for i in range(options.rounds):
            shift = i % len(peers)
            found = {peer: run(peer, storage, options.deepspeed) for peer in peers[shift:] + peers[:shift]}
            rounds.append(found)
            print(f"round {i + 1}: " + "  ".join(f"{p} {found[p]['tokens_per_second']:.0f}" for p in peers), flush=True)
    table = {}
    for peer in peers:
        median = {k: statistics.median(r[peer][k] for r in rounds) for k in rounds[0][peer]}
        torchrun = f"torchrun FSDP2 {'zero2' if 'zero2' in peer else 'zero3'}" if options.sharded else "torchrun"
        for base, name in ((torchrun, "over_torchrun"), ("ray train", "over_ray_train")):
            for figure in ("tokens_per_second", "first_step_s", "rss_mb"):
                if base in peers:
                    ratios = [r[peer][figure] / r[base][figure] for r in rounds]
                    median[f"{figure}_{name}"] = statistics.median(ratios)
        table[peer] = median
    print(
        f"\n{'peer':28s} {'tokens/s':>9s} {'/torchrun':>9s} {'cpu ms':>7s} {'RSS MB':>7s} {'first step s':>12s} {'/ray train':>10s}"
    )
    for peer, row in table.items():
        print(
            f"{peer:28s} {row['tokens_per_second']:9.0f} {row.get('tokens_per_second_over_torchrun', 0):9.3f} {row['cpu_ms']:7.0f} "
            f"{row['rss_mb']:7.0f} {row['first_step_s']:12.2f} {row.get('first_step_s_over_ray_train', 0):10.3f}"
        )
    print(write("peers_sharded" if options.sharded else "peers", {"rounds": rounds, "medians": table}))


if __name__ == "__main__":
    main()
