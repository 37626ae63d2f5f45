"""Speed of one GPU training in bf16, and the breakdown of a step's time: GPTs of 124M and 1.5B parameters, a Llama of 1B with a
context of 4096, and a DeepSeek of 3B with 64 experts.

    python -m benchmarks.gpu.train [--quick] [--out FOLDER]          in the repository's root; torch without ray is enough
    python -m benchmarks.gpu.train --device cpu --tiny               checks that it runs

Each variant runs raydist's own step (raydist.worker.step.TrainStep, with the gradient norm and clipping) on random tokens in
sequences of the model's context, with a fixed number of tokens per step. The micro-batch is the largest power of two whose memory
peak, extrapolated from the peaks of one and two sequences without compilation, fits into 90% of the memory; --micro-batch overrides
it.
MFU is given relative to the device's known peak, and to the measured rate of bf16 matrix products with the model's shapes. The
time breakdown comes from kineto's trace of three more steps, by kernel name.

Results are written after each variant, and no variant starts after --seconds, so a short visit keeps its results.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import RESULTS, write
from benchmarks.gpu.rates import attention_rates, matmul_rate
from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.report.overlap import length, union
from raydist.spec import JobSpec
from raydist.worker import build, model_transforms
from raydist.worker.dataloader import to_device
from raydist.worker.distributed import Rank
from raydist.worker.expert_loads import ExpertLoads
from raydist.worker.loss import build as build_loss
from raydist.worker.mesh import Mesh
from raydist.worker.metrics import flops
from raydist.worker.metrics.device_clock import Marks
from raydist.worker.metrics.memory import Held
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep
from raydist.worker.step_hooks import BeforeUpdate

Event = dict[str, Any]

MODELS: dict[str, dict[str, Any]] = {
    "124M": {"layers": 12, "width": 768, "heads": 12, "context": 1024},
    "1.5B": {"layers": 48, "width": 1600, "heads": 25, "context": 1024},
    "llama 1B": {
        "name": "llama", "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "hidden": 8192, "context": 4096,
        "tie_embeddings": True,
    },
    "deepseek 3B": {
        "name": "deepseek", "layers": 16, "width": 1024, "heads": 16, "hidden": 2816, "context": 4096,
        "options": {
            "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 1,
            "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 896, "n_group": 8, "topk_group": 4,
            "routed_scaling_factor": 2.5, "balance_loss": 1e-4, "bias_rate": 0.001, "num_nextn_predict_layers": 1,
        },
    },
    "tiny": {"layers": 2, "width": 64, "heads": 2, "context": 64},
    "tiny deepseek": {
        "name": "deepseek", "layers": 2, "width": 64, "heads": 2, "hidden": 128, "context": 64,
        "options": {
            "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "balance_loss": 1e-4,
            "bias_rate": 0.001, "num_nextn_predict_layers": 1,
        },
    },
}  # fmt: skip
VOCAB = {"124M": 50304, "1.5B": 50304, "llama 1B": 128256, "deepseek 3B": 50304, "tiny": 512, "tiny deepseek": 512}
GPU_MODELS = [name for name in MODELS if not name.startswith("tiny")]
AIMS = {"124M": 0.4, "1.5B": 0.5}
"""Target MFU, relative to the device's peak."""
STEP_TOKENS = dict.fromkeys(("1.5B", "llama 1B", "deepseek 3B"), 1 << 16) | {"124M": 1 << 17}
STEP_TOKENS |= {"tiny": 512, "tiny deepseek": 512}
MOST = {"124M": 64, "1.5B": 32, "llama 1B": 16, "deepseek 3B": 16, "tiny": 4, "tiny deepseek": 4}
"""Maximum sequences per micro-batch; more do not make the matrix products faster."""
ROOM = 0.9
"""Usable share of the memory; the rest is for allocators and libraries."""
PARTS = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "cudnn_generated")),
    ("optimizer, norm and clip", ("adam", "multi_tensor", "foreach")),
    ("matmul", ("gemm", "nvjet", "cutlass", "xmma", "wgmma", "splitk", "cublas", "triton_tem", "triton_mm")),
    ("cross-entropy", ("softmax", "nll_loss", "arange_eq", "logsumexp")),
    ("copies", ("memcpy", "memset")),
)
"""A kernel belongs to the first part of which a word is in its name; else to REST: norms, rotary embedding, casts."""
REST = "elementwise and norms"


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration. `sections`: job sections besides the model."""

    name: str
    model: str
    sections: dict[str, Any]


def variants(models: Sequence[str], quick: bool) -> list[Variant]:
    """All variants, the most important ones first."""
    ways: dict[str, dict[str, Any]] = {
        "blocks compiled": {"train": {"compile": "blocks"}},
        "all compiled": {"train": {"compile": True}},
        "eager": {},
        "blocks compiled, selective": {"train": {"compile": "blocks", "checkpoint_activations": "selective"}},
        "blocks compiled, optimizer on the CPU": {"train": {"compile": "blocks"}, "offload": {"optimizer": "cpu"}},
    }
    names = list(ways)[:1] if quick else list(ways)
    # Compiling 48 layers as one graph takes minutes: that comes last.
    late = [(m, w) for m in models for w in names if (m, w) == ("1.5B", "all compiled")]
    order = [(m, w) for w in names for m in models if (m, w) not in late] + late
    return [Variant(f"{model}, {way}", model, ways[way]) for model, way in order]


def job(model: str, sections: dict[str, Any], micro_batch: int) -> JobSpec:
    """A job with steps of about STEP_TOKENS, in whole micro-batches."""
    count = max(1, STEP_TOKENS[model] // (micro_batch * MODELS[model]["context"]))
    train = {"steps": 1, "micro_batch": micro_batch, "global_batch": micro_batch * count, **sections.get("train", {})}
    about = {"data": {"source": "any"}, "model": MODELS[model], "precision": "bf16"}
    return JobSpec.model_validate(about | sections | {"train": train})


class Trainer:
    """Model, optimizer and step, built as in the training loop. The model is not compiled yet."""

    def __init__(self, rank: Rank, model: str, sections: dict[str, Any]) -> None:
        self.rank, self.name, self.sections = rank, model, sections
        spec = self.spec = job(model, sections, 1)
        vocab, context = VOCAB[model], spec.model.context
        self.precision = Precision(spec.precision, rank.device)
        self.strategy = registry.load("parallel", "ddp")(spec, Mesh(rank))
        self.model = build.build_model(spec, vocab)
        self.flops_per_token = flops.flops_per_token(self.model, context)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        g = torch.Generator().manual_seed(0)
        text = torch.randint(vocab, (MOST[model], context + 1), generator=g)
        self.tokens, self.targets = (t.contiguous() for t in (text[:, :-1], text[:, 1:]))
        if rank.device.type == "cuda":
            self.tokens, self.targets = self.tokens.pin_memory(), self.targets.pin_memory()
        self.loss = build_loss(spec)
        self.strategy.wrap(self.model, lambda module: self._example(module))
        model_transforms.prepare(self.model, spec.train.model_copy(update={"compile": False}))
        shards = self.strategy.shards()
        self.optimizer = build.build_optimizer(spec, rank, self.strategy, shards)
        self.loads = ExpertLoads([self.model], rank, None, None)
        self.held: Held | None = None

        def look() -> None:
            self.held = Held.of(self.model, shards, self.optimizer, rank.device)

        self.look = look
        self.use(1)

    def _example(self, module: torch.nn.Module) -> torch.Tensor:
        with self.precision.autocast():
            return self.loss(module, to_device(MicroBatch(self.tokens[:1], self.targets[:1]), self.rank.device))

    def use(self, micro_batch: int) -> None:
        """Uses steps with that micro-batch from now on."""
        spec = job(self.name, self.sections, micro_batch)
        self.count, self.micro_batch = spec.train.global_batch // micro_batch, micro_batch
        self.step_tokens = spec.train.global_batch * spec.model.context
        self.step = TrainStep(
            Mesh(self.rank),
            self.strategy,
            self.optimizer,
            self.precision,
            parameters=gather_parameters(self.strategy.shards(), self.rank),
            full_tokens=self.step_tokens,
            clip=spec.optim.clip,
            hooks=[*([self.loads] if self.loads.counts else []), BeforeUpdate(self.look)],
            loss=self.loss,
        )

    def compile(self) -> None:
        """Compiles the model as the job specifies."""
        model_transforms.prepare(self.model, self.spec.train.model_copy(update={"checkpoint_activations": "none"}))

    def __call__(self, count: int | None = None) -> float:
        """Runs one step of `count` micro-batches; returns its loss."""
        micro = MicroBatch(self.tokens[: self.micro_batch], self.targets[: self.micro_batch])
        batches = [to_device(micro, self.rank.device) for _ in range(count or self.count)]
        return self.step(1, batches, len(batches) * micro.targets.numel(), 1e-4, want_stop=False).loss

    def close(self) -> None:
        """Frees the memory."""
        self.step.optimizer_hooks.close()
        for name in ("step", "strategy", "optimizer", "model", "look", "loads"):
            delattr(self, name)


def peak(trainer: Trainer, micro_batch: int) -> int:
    """Peak bytes of a step with two micro-batches, without compilation."""
    trainer.use(micro_batch)
    trainer(2)
    torch.cuda.reset_peak_memory_stats()
    trainer(2)
    return torch.cuda.max_memory_allocated()


def fitting(trainer: Trainer) -> int:
    """The largest micro-batch, a power of two, that fits."""
    most = MOST[trainer.name]
    if trainer.rank.device.type != "cuda":
        return most
    one, two = peak(trainer, 1), peak(trainer, 2)
    room = ROOM * torch.cuda.get_device_properties(trainer.rank.device).total_memory
    while most > 1 and one + (two - one) * (most - 1) > room:
        most //= 2
    return most


def measured(rank: Rank, variant: Variant, micro_batch: int | None, steps: int) -> dict[str, Any]:
    """Measures one variant; returns its row."""
    cuda = rank.device.type == "cuda"
    begun = time.perf_counter()
    trainer = Trainer(rank, variant.model, variant.sections)
    try:
        trainer.use(micro_batch or fitting(trainer))
        trainer.compile()
        built = time.perf_counter()
        trainer()  # compiles
        compiled = time.perf_counter()
        trainer()
        trainer()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        marks = Marks(rank.device)
        marks.mark()
        for _ in range(steps):
            loss = trainer()
            marks.mark()
        times = sorted(marks.seconds())
        step_s = times[len(times) // 2]
        rate = trainer.step_tokens / step_s
        row: dict[str, Any] = {
            "parameters": trainer.parameters,
            "micro_batch": trainer.micro_batch,
            "step_tokens": trainer.step_tokens,
            "step_s": round(step_s, 5),
            "slowest_over_median": round(times[-1] / step_s, 3),
            "tokens_per_s": round(rate),
            "flops_per_token": trainer.flops_per_token,
            "tflops": round(rate * trainer.flops_per_token / 1e12, 1),
            "loss": round(loss, 4),
            "build_s": round(built - begun, 1),
            "first_step_s": round(compiled - built, 1),
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        }
        if cuda:
            assert trainer.held is not None
            top = torch.cuda.max_memory_allocated()
            row["mfu"] = flops.mfu(rate, trainer.flops_per_token, torch.cuda.get_device_name(), 1)
            row |= {"peak_bytes": top, "state_bytes": trainer.held.on_device}
            row["reserved_bytes"] = torch.cuda.memory_reserved()
        row["time"] = times_by_part(rank, trainer)
        return row
    finally:
        trainer.close()
        del trainer
        gc.collect()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if cuda:
            torch.cuda.empty_cache()


def times_by_part(rank: Rank, trainer: Trainer, steps: int = 3) -> dict[str, Any]:
    """Time breakdown of `steps` steps under the profiler."""
    cuda = rank.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiled:
        trainer()  # CUPTI's first launches are slow
        with torch.profiler.record_function("measured"):
            for _ in range(steps):
                trainer()
            if cuda:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(whole))
        events = json.loads(whole.read_text())["traceEvents"]
    window = next(e for e in events if e.get("name") == "measured" and e.get("cat") == "user_annotation")
    return parts(events, float(window["ts"]), float(window["ts"]) + float(window["dur"]))


def part_of(kernel: str) -> str:
    """The part of PARTS that a kernel belongs to."""
    low = kernel.lower()
    return next((part for part, words in PARTS if any(word in low for word in words)), REST)


def parts(events: Iterable[Event], begin_us: float, end_us: float) -> dict[str, Any]:
    """Share of the window of each part and of gaps, and the longest kernels. Concurrent kernels both count."""
    spent: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        begin, end = max(event["ts"], begin_us), min(event["ts"] + event["dur"], end_us)
        if end <= begin:
            continue
        busy.append((begin, end))
        name = event["name"] if event["cat"] == "kernel" else event["cat"].removeprefix("gpu_")
        spent[part_of(name)] += end - begin
        kernels[name[:120]] += end - begin
    total = end_us - begin_us
    shares = {part: round(us / total, 4) for part, us in spent.most_common()}
    shares["gaps"] = round(1 - length(union(busy)) / total, 4)
    top = {name: round(us / total, 4) for name, us in kernels.most_common(15)}
    return {"shares": shares, "kernels": top}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check that it runs")
    parser.add_argument("--quick", action="store_true", help="one variant per model")
    parser.add_argument("--models", nargs="+", choices=GPU_MODELS, default=GPU_MODELS)
    parser.add_argument("--micro-batch", type=int, help="sequences; default: what fits")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=480.0, help="start no variant after this time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu_train.json")
    asked = parser.parse_args()
    began = time.perf_counter()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device: run this where there is one, or try --device cpu --tiny")
    device = torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu")
    cuda = device.type == "cuda"
    rank = Rank(0, 1, 0, device, "nccl" if cuda else "gloo", "127.0.0.1", None, ())
    models = [name for name in MODELS if name not in GPU_MODELS] if asked.tiny else asked.models
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cuda": torch.version.cuda,
        "peak_flops": flops.peak_flops(torch.cuda.get_device_name(device)) if cuda else None,
        "aims_mfu": AIMS,
        "matmul_flops": {},
        "attention_flops": {},
        "variants": {},
        "left_out": [],
    }
    repeat = 20 if cuda else 1
    for model in models:
        if "options" in MODELS[model]:
            continue  # experts and latent attention have other shapes
        sequences = 16 * 1024 // MODELS[model]["context"] if cuda else 1
        result["matmul_flops"][model] = matmul_rate(
            device, MODELS[model], VOCAB[model], sequences * MODELS[model]["context"], repeat
        )
        result["attention_flops"][model] = attention_rates(device, MODELS[model], sequences, repeat)
    print(json.dumps({k: result[k] for k in ("gpu", "matmul_flops", "attention_flops")}), flush=True)
    for variant in variants(models, asked.quick):
        if time.perf_counter() - began > asked.seconds:
            result["left_out"].append(variant.name)
            continue
        try:
            row = measured(rank, variant, asked.micro_batch, asked.steps)
            if variant.model in result["matmul_flops"]:
                row["mfu_of_matmul"] = round(row["tflops"] * 1e12 / result["matmul_flops"][variant.model], 4)
        except Exception as error:  # a failure must not prevent the other variants: the visit is short
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        result["variants"][variant.name] = row
        path = write("gpu_train", result, asked.out)
        print(f"{time.perf_counter() - began:6.1f} s  {variant.name}: {json.dumps(row)}", flush=True)
    write("gpu_train", result, asked.out)
    print(path)
    return int(any("error" in row for row in result["variants"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
