"""Forecasts of `raydist plan` beside published figures of Megatron-LM and torchtitan. Trains nothing.

    python benchmarks/forecast.py

Megatron-LM: Narayanan et al. 2021 (arXiv 2104.04473), table 1: A100 of 80 GB, 8 per node, 312 TFLOP/s; vocabulary 51,200,
sequences of 2,048, recomputed activations, which its FLOP/s count. Its feed-forward layers of 4 x width without a gate have the
weights and multiplications of ours; what passes between layers has 16 bits there and 32 here. The table has no micro-batches: they
are 1 here; and no schedule: it is 1F1B here.

torchtitan: benchmarks/llama3_h100_202412_torchtitan.md of its repository, December 2024: H100 of 96 GB and 500 W, 8 per node,
Llama 3.1. Figures with Float8 are compared as ratios only, because float8 has another peak.

One efficiency for all rows of a table: errors with 0.4, the default, and with the one that makes the first row exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import write

from raydist.planner import speed as reckoned
from raydist.planner.estimate import estimates, measured
from raydist.planner.facts import Machine
from raydist.planner.measure import Planner
from raydist.planner.scaling import JITTER, slowest
from raydist.spec import JobSpec

# heads, width, layers, tensor, pipeline, GPUs, batch -> TFLOP/s of a GPU
MEGATRON = {
    "1.7B": (24, 2304, 24, 1, 1, 32, 512, 137),
    "3.6B": (32, 3072, 30, 2, 1, 64, 512, 138),
    "7.5B": (32, 4096, 36, 4, 1, 128, 512, 142),
    "18.4B": (48, 6144, 40, 8, 1, 256, 1024, 135),
    "39.1B": (64, 8192, 48, 8, 2, 512, 1536, 138),
    "76.1B": (80, 10240, 60, 8, 4, 1024, 1792, 140),
    "145.6B": (96, 12288, 80, 8, 8, 1536, 2304, 148),
    "310.1B": (128, 16384, 96, 8, 16, 1920, 2160, 155),
    "529.6B": (128, 20480, 105, 8, 35, 2520, 2520, 163),
    "1008B": (160, 25600, 128, 8, 64, 3072, 3072, 163),
}
LLAMA = {
    "8B": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336},
    "70B": {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "hidden": 28672},
    "405B": {"layers": 126, "width": 16384, "heads": 128, "kv_heads": 8, "hidden": 53248},
}


class Forecast:
    """A job on GPUs of one kind. `flops`: of a token, without recomputation."""

    def __init__(self, gpu: str, gpus: int, vocab: int, model: dict[str, Any], **sections: Any) -> None:
        found = reckoned.find(gpu)
        assert found is not None
        self.device, self.machine = found, Machine(gpus, 8, "cuda", found.memory)
        plain: dict[str, Any] = {"data": {"source": "any"}, "precision": "bf16", "cluster": {"workers": gpus}}
        train = {"steps": 1, **sections.pop("train")}
        self.spec = JobSpec.model_validate(
            {**plain, **sections, "train": train, "model": {"tie_embeddings": False, **model}}
        )
        planner = Planner(self.spec, vocab, "cuda")
        self.model, self.flops, self._measure = planner.model(), planner.flops_per_token(), planner.measure
        strategy = self.spec.parallel.strategy
        self.passes = measured(strategy, self.spec, self.machine, self.model, planner.measure)

    def speed(self, efficiency: float = reckoned.EFFICIENCY) -> reckoned.Speed:
        """With a share of the peak."""
        device, strategy = self.device.but(efficiency, None, None), self.spec.parallel.strategy
        return reckoned.speed(strategy, self.spec, self.machine, self.model, device, self.flops, self.passes)

    def each(self, efficiency: float = reckoned.EFFICIENCY) -> float:
        """Tokens/s of a GPU."""
        return self.speed(efficiency).tokens_per_second / self.machine.ranks

    def gib(self) -> float:
        """Of the rank with the most."""
        found = estimates(self.spec.parallel.strategy, self.spec, self.machine, self.model, self._measure)
        return max(one.total for one in found) / 2**30

    def calibrated(self, tokens: float) -> float:
        """The efficiency with which the forecast is this many tokens/s of a GPU."""
        low, high = 0.05, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.each(middle) < tokens else (low, middle)
        return low


def megatron() -> dict[str, Any]:
    """Each row of the table: TFLOP/s of a GPU, with recomputation, published and forecast."""
    rows: dict[str, Any] = {}
    first = None
    for name, (heads, width, layers, tensor, pipeline, gpus, batch, published) in MEGATRON.items():
        job = Forecast(
            "a100-80", gpus, 51200, {"layers": layers, "width": width, "heads": heads, "context": 2048},
            train={"global_batch": batch, "micro_batch": 1, "checkpoint_activations": "full"},
            parallel={"strategy": "ddp", "tensor": tensor, "pipeline": pipeline},
        )  # fmt: skip
        # The paper's own count (its equation 3), of a token: four passes of layers, three of the head.
        of_token = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        if first is None:
            first = job.calibrated(published * 1e12 / of_token)
        forecasts = [job.each(efficiency) * of_token / 1e12 for efficiency in (reckoned.EFFICIENCY, first)]
        rows[name] = {
            "published": published,
            "forecast": round(forecasts[0], 1),
            "error": round(forecasts[0] / published - 1, 3),
            "calibrated_error": round(forecasts[1] / published - 1, 3),
            "bubble": round(job.speed().bubble, 3),
        }
        print(name, rows[name], flush=True)
    return {"efficiency": round(first or 0.0, 3), "rows": rows}


def torchtitan() -> dict[str, Any]:
    """FSDP in bf16 as tokens/s of a GPU and memory; schedules of the 405B as a ratio."""
    rows: dict[str, Any] = {}
    fsdp = {"strategy": "zero3"}
    for name, gpus, published, memory in (("8 GPUs", 8, 5762, 82.4), ("128 GPUs", 128, 5605, 67.0)):
        job = Forecast(
            "h100", gpus, 128256, {**LLAMA["8B"], "context": 8192}, parallel=fsdp,
            train={"global_batch": 2 * gpus, "micro_batch": 2, "checkpoint_activations": "selective"},
        )  # fmt: skip
        forecast = job.each()
        rows[f"8B, {name}"] = {
            "published": published, "forecast": round(forecast), "error": round(forecast / published - 1, 3),
            "efficiency": round(job.calibrated(published), 3), "memory_published": memory, "memory": round(job.gib(), 1),
        }  # fmt: skip
        print(name, rows[f"8B, {name}"], flush=True)
    speeds = {}
    for chunks in (1, 2):
        job = Forecast(
            "h100", 512, 128256, {**LLAMA["405B"], "context": 8192},
            train={"global_batch": 256, "micro_batch": 1, "checkpoint_activations": "full"},
            parallel={"strategy": "zero3", "tensor": 8, "pipeline": 8, "chunks": chunks},
        )  # fmt: skip
        speeds[chunks] = job.speed()
        print("405B", chunks, speeds[chunks], flush=True)
    rows["405B, interleaved over 1F1B"] = {
        "published": 1.28,
        "forecast": round(speeds[2].tokens_per_second / speeds[1].tokens_per_second, 3),
        "bubbles": [round(speeds[c].bubble, 3) for c in (1, 2)],
    }
    return rows


def sevenb(gpus: int, strategy: str) -> Forecast:
    """7B on H100s, four sequences for each."""
    return Forecast(
        "h100", gpus, 102400, {"layers": 30, "width": 4096, "heads": 32, "hidden": 11008, "context": 4096},
        train={"global_batch": 4 * gpus, "micro_batch": 4, "checkpoint_activations": "full"},
        parallel={"strategy": strategy},
    )  # fmt: skip


def linear_scaling() -> dict[str, Any]:
    """7B on 32 H100s over four times 7B on 8, with the same sequences for each GPU; and the efficiency of the network that 82%
    would need."""
    rows = {}
    for strategy in ("ddp", "zero1", "zero3", "hsdp"):
        found = {}
        for gpus in (8, 32):
            job = sevenb(gpus, strategy)
            for network in (50.0, 12.5, 3.125):
                device = job.device.but(None, None, network)
                found[gpus, network] = reckoned.speed(
                    strategy, job.spec, job.machine, job.model, device, job.flops, job.passes
                ).tokens_per_second
        rows[strategy] = {f"{n:g} GB/s": round(found[32, n] / (4 * found[8, n]), 3) for n in (50.0, 12.5, 3.125)}
        print(strategy, rows[strategy], flush=True)
    return rows


CLAIMED = (0.58, 0.72, 0.85, 0.91)
"""The efficiency of 7B on 32 GPUs after one measure after another, as the claim has it; it names neither network nor measures."""


def claims() -> dict[str, Any]:
    """What would have to hold for two claims of 7B on 32 H100s over 8: 82%, and 58 -> 72 -> 85 -> 91% after three measures.

    For the second: the network with which ddp whose collectives overlap with nothing is at 58%, and then its forecast if each
    measure halves what is sent (fp32, bf16, int8, 4 bits); and on the same network the forecast with the overlap that ddp has.
    """
    jobs = {gpus: sevenb(gpus, "ddp") for gpus in (8, 32)}

    def over(network: float, halved: int = 0, overlap: bool = False) -> float:
        seconds = {}
        for gpus, job in jobs.items():
            device = job.device.but(None, None, network * (2**halved if overlap else 1))
            found = reckoned.speed("ddp", job.spec, job.machine, job.model, device, job.flops, job.passes)
            seconds[gpus] = found.seconds if overlap else found.compute + found.communication / 2**halved
        return seconds[8] / seconds[32]

    network = root(lambda x: over(x), CLAIMED[0], 0.1, 50.0)
    late = {gpus: slowest(gpus) for gpus in jobs}

    def jittered(jitter: float) -> float:
        return (1 + jitter * late[8]) / (1 + jitter * late[32])

    found = {
        "82%": {
            "efficiency_with_default_jitter": round(jittered(JITTER), 4),
            "jitter_for_82%": round(root(lambda x: -jittered(x), -0.82, 0.0, 2.0), 3),
            "network_for_82%_without_overlap": round(root(lambda x: over(x), 0.82, 0.1, 50.0), 2),
            "network_for_82%_with_overlap": round(root(lambda x: over(x, overlap=True), 0.82, 0.1, 50.0), 2),
        },
        "58_72_85_91%": {
            "claimed": CLAIMED,
            "network": round(network, 2),
            "halved_each_time_without_overlap": [round(over(network, n), 3) for n in range(4)],
            "with_overlap": [round(over(network, n, overlap=True), 3) for n in range(4)],
        },
    }
    print(found, flush=True)
    return found


def root(rises: Callable[[float], float], aim: float, low: float, high: float) -> float:
    """Where a rising function has that value."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < aim else (low, middle)
    return low


if __name__ == "__main__":
    results = {"megatron": megatron(), "torchtitan": torchtitan(), "7B_32_over_8": linear_scaling(), "claims": claims()}
    print(write("forecast", results))
