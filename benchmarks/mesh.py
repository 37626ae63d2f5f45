"""Time of a training step on a mesh, beside torch doing the same, in one interleaved run.

    python benchmarks/mesh.py [tensor | pipeline | expert | bubble | bubble_wide] [--rounds 12] [--rate none | 1gbit | 200mbit]

With `--rate` each rank is on a host of its own, a network namespace whose link has that rate; it needs root. The result has also
the bytes of rank 0's link in a step, with TCP's and Ethernet's headers, over those of `raydist plan`. A result joins those of other
rates in the file.

Two gloo ranks of one thread each train the same GPT on the same samples, with fused AdamW. Their processes have the variables that
raydist sets for its ranks: with them malloc takes huge pages. They run all variants alternately, in a new order each round: one
warm-up step, then two measured ones. raydist's is raydist.worker.step.TrainStep. The losses of the first step must agree.

tensor: sequence parallel layers, a loss over a split vocabulary, and clipping; torch's is parallelize_module with the styles of its
tutorial, loss_parallel and clip_grad_norm_.
pipeline: eight micro-batches in two stages (1F1B) or four (interleaved), cut alike; torch's is torch.distributed.pipelining, whose
last stage computes cross_entropy of all logits. Both sum the gradient norm over the ranks.
expert: 8 experts a layer, of which a token takes 2, on two replicas that share them; torch's is a layer by hand with
all_to_all_single_autograd and grouped_mm, in DistributedDataParallel, which leaves the experts out. Both sum the gradient norm over
the ranks; raydist also sums the loads of the experts, and torch's variant does not.
bubble: two micro-batches of four sequences in two stages, four and eight, raydist's alone: the speed of interleaved schedules over
1F1B, where ranks wait a third of the step, and over what the formula of the bubble gives. The vocabulary is small, so that stages
are nearly equal.
bubble_wide: the same with layers of width 768, as GPT-2 small has. The multiplications of a stage grow with the square of the
width, what passes between stages with the width, and what else a pass costs not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import RESULTS, interleaved, machine, on_hosts, write
from links import RATES, Forecast, sent_on
from mesh_variants import (
    FEW,
    FEW_IDS,
    FEW_MODELS,
    MICRO_BATCHES,
    MODEL,
    SPARSE,
    STAGED,
    VOCAB,
    WORLD,
    jobs,
    variants_of,
)

from raydist.launch import fork_server
from raydist.worker.distributed import Rank

BURSTS = {"none": "128kb", **{rate: burst for rate, burst in RATES.values() if rate is not None}}

COMPARED = {
    "tensor": [("", "torch", "raydist")],
    "expert": [("", "torch", "raydist")],
    "pipeline": [
        *((f"{name}_", f"{name}_torch", f"{name}_raydist") for name in ("1f1b", "interleaved")),
        ("interleaved_over_1f1b_", "1f1b_raydist", "interleaved_raydist"),
    ],
    **{
        bubble: [(f"{name}_over_1f1b_", "1f1b", name) for name in ("chunks_2", "chunks_4")]
        for bubble in ("bubble", "bubble_wide")
    },
}
"""Key of a ratio, and the variants that it is of: the second over the first."""


def measure(rank: Rank, what: str, rounds: int, interface: str) -> dict[str, Any]:
    """The result of a rank. A collective. `bytes`: that left the rank's `interface` in a step of each variant."""
    variants, tokens = variants_of(what, rank)
    first = {name: step() for name, step in variants.items()}
    assert max(first.values()) - min(first.values()) < 1e-5 * min(first.values()), first
    wall, processor = interleaved(variants, rounds, dist.barrier)
    sent = {}
    for name, step in variants.items():
        dist.barrier()
        before = sent_on(interface)
        for _ in range(2):
            step()
        dist.barrier()
        sent[name] = (sent_on(interface) - before) // 2
    model = {"tensor": MODEL, "expert": SPARSE, **FEW_MODELS}.get(what, STAGED)
    result: dict[str, Any] = {"rounds": rounds, "load_average": os.getloadavg()[1], "ranks": WORLD, "model": model}
    if what == "pipeline" or what in FEW_MODELS:
        result["micro_batches"] = FEW if what in FEW_MODELS else MICRO_BATCHES
    for name, theirs, ours in COMPARED[what]:
        beside = "over_torch" if theirs.endswith("torch") else ""
        for kind, times in (("speed", wall), ("processor_time", processor)):
            ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
            ratios = sorted(ratios if kind == "speed" else (1 / ratio for ratio in ratios))
            key = f"{name}{kind}_{beside}".rstrip("_")
            result[key] = round(statistics.median(ratios), 4)
            result[f"{key}_quartiles"] = [round(ratios[len(ratios) * k // 4], 4) for k in (1, 3)]
    if what in FEW_MODELS:
        for chunks in (2, 4):
            busy = [n * FEW / (n * FEW + WORLD - 1) for n in (1, chunks)]
            formula = busy[1] / busy[0]
            speed = result[f"chunks_{chunks}_over_1f1b_speed"]
            result |= {
                f"chunks_{chunks}_formula": round(formula, 4),
                f"chunks_{chunks}_of_formula": round(speed / formula, 4),
            }
    result["tokens_per_second"] = {name: round(tokens / statistics.median(times), 1) for name, times in wall.items()}
    return result | {"bytes": sent}


def with_forecasts(what: str, found: dict[str, Any]) -> dict[str, Any]:
    """The result with raydist's bytes over those of the plan."""
    vocabulary = FEW_IDS if what in FEW_MODELS else VOCAB
    over = {name: found["bytes"][name] / Forecast(spec, vocabulary).sent for name, spec in jobs(what).items()}
    return found | {"bytes_over_forecast": {name: round(ratio, 4) for name, ratio in over.items()}}


def in_group(number: int, master: str, port: int, interface: str, rounds: int, what: str) -> dict[str, Any]:
    """`measure` on a rank; each counts as a node if the ranks are on hosts."""
    os.environ.update(MASTER_ADDR=master, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=interface)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    on_one = interface == "lo"
    node = "127.0.0.1" if on_one else f"host {number}"
    control = dist.new_group(backend="gloo")
    rank = Rank(number, WORLD, number if on_one else 0, torch.device("cpu"), "gloo", node, control, ())
    found = measure(rank, what, rounds, interface)
    dist.barrier()
    dist.destroy_process_group()
    return found


def spawned(number: int, port: int, rounds: int, what: str) -> None:
    """A rank on this host. Rank 0 writes the result, without the bytes: its interface has those of both ranks."""
    found = in_group(number, "127.0.0.1", port, "lo", rounds, what)
    if number == 0:
        del found["bytes"]
        save(what, found)


def save(what: str, found: Mapping[str, Any]) -> None:
    """Writes the result over that of the same kind; of a link, beside those of others."""
    print(found)
    name = "mesh" if what == "tensor" else "mesh_pipeline" if what in FEW_MODELS else f"mesh_{what}"
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    if "rate" in found:
        kept[f"{what} on {found['rate']}"] = {"machine": machine(), **found}
    elif what in FEW_MODELS:
        kept[what] = {"machine": machine(), **found}
    else:
        kept |= {"machine": machine(), **found}
    print(write(name, kept))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", default="tensor", choices=COMPARED)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rate", choices=BURSTS, help="of each host's link; without: two ranks on this host")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--master", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ |= {**fork_server.VARIABLES, **os.environ}  # of the ranks, which this process starts
    if asked.rank is not None:
        of_rank = in_group(asked.rank, asked.master, 29500, "eth0", asked.rounds, asked.what)
        if asked.rank == 0:
            print(json.dumps(of_rank), flush=True)
    elif asked.rate:
        given = [asked.what, "--rounds", str(asked.rounds)]
        of_hosts = on_hosts(__file__, WORLD, asked.rate, given, BURSTS[asked.rate])
        save(asked.what, {"rate": asked.rate, **with_forecasts(asked.what, of_hosts)})
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        mp.spawn(spawned, (free_port, asked.rounds, asked.what), nprocs=WORLD)
