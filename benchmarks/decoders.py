"""Time of a training step of decoders, beside transformers' models of the same shape in torch's DDP, in one interleaved run.

    python benchmarks/decoders.py [llama | deepseek_tiny] [--rounds 12]

Two gloo ranks of one thread each train on the same samples, from the same weights, with clipping and fused AdamW. They run both
variants alternately, in a new order each round: one warm-up step, then two measured ones. raydist's is
raydist.worker.step.TrainStep under ddp; transformers' is the loop that people start with torchrun: DistributedDataParallel around
AutoModelForCausalLM, cross_entropy of its logits, clip_grad_norm_. The losses of the first step must agree.

llama: 6 blocks of width 384. deepseek_tiny: jobs/deepseek_tiny.yaml without the layer for further tokens and the balance loss,
which transformers does not train; raydist also sums the loads of the experts and moves the routers' biases, and transformers does
neither.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import transformers
from common import interleaved, write
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.spec import JobSpec, load
from raydist.spec.huggingface import format_of
from raydist.worker.checkpoint.export import hf_config
from raydist.worker.distributed import Rank
from raydist.worker.expert_loads import ExpertLoads
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.parallel.ddp import Strategy
from raydist.worker.parameter_table import gather_parameters
from raydist.worker.precision import Precision
from raydist.worker.step import TrainStep, loss_sum

WORLD, LR, VOCAB = 2, 1e-3, 2048
JOBS = Path(__file__).parents[1] / "jobs"
LLAMA = {"name": "llama", "layers": 6, "width": 384, "heads": 6, "kv_heads": 2, "hidden": 1024, "context": 256,
         "tie_embeddings": False}  # fmt: skip
SEQUENCES = {"llama": 4, "deepseek_tiny": 8}
"""Of a rank in a step."""


def job(name: str) -> JobSpec:
    """The job of a variant, on two workers."""
    if name == "llama":
        tree = {"data": {"source": "any"}, "train": {"steps": 1}, "model": LLAMA, "cluster": {"workers": WORLD}}
        return JobSpec.model_validate(tree)
    spec = load(JOBS / "deepseek_tiny.yaml")
    options = {**spec.model.options, "num_nextn_predict_layers": 0, "balance_loss": 0.0}
    return spec.model_copy(update={"model": spec.model.model_copy(update={"options": options})})


def ours_of(spec: JobSpec) -> nn.Module:
    """raydist's model, the same on both ranks."""
    torch.manual_seed(1)
    model: nn.Module = registry.load("model", spec.model.name)(spec.model, VOCAB)
    return model


def theirs_of(spec: JobSpec) -> nn.Module:
    """transformers' model with the same weights, from a folder, as people load it."""
    format = format_of(spec.model.name)
    assert format is not None
    tensors = {
        piece.name: value[piece.at].contiguous().clone()
        for name, value in ours_of(spec).state_dict().items()
        if not (spec.model.tie_embeddings and name == "head.weight")
        for piece in format.pieces(name, tuple(value.shape))
    }
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(hf_config(spec.model, VOCAB, end=None)))
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    made: nn.Module = model.train()
    return made


class Ours:
    """raydist's step."""

    def __init__(self, rank: Rank, spec: JobSpec, tokens: Tensor) -> None:
        self.batch = MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous())
        self.tokens = tokens[:, 1:].numel()
        mesh, model = Mesh.of(spec, rank), ours_of(spec)
        strategy = Strategy(spec, mesh)
        strategy.wrap(model, lambda module, **_: loss_sum(module, self.batch))
        shards, loads = strategy.shards(), ExpertLoads([model], rank, None, None)
        self.step = TrainStep(
            mesh, strategy, optimizers.build(shards, spec.optim, rank.device), Precision(spec.precision, rank.device),
            parameters=gather_parameters(shards, rank), full_tokens=WORLD * self.tokens, clip=1.0,
            hooks=[loads] if loads.counts else [],
        )  # fmt: skip

    def __call__(self) -> float:
        """One step; its loss."""
        return self.step(1, [self.batch], self.tokens, LR, want_stop=False).loss


class Theirs:
    """DistributedDataParallel around transformers' model."""

    def __init__(self, spec: JobSpec, tokens: Tensor) -> None:
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.model = DistributedDataParallel(theirs_of(spec), gradient_as_bucket_view=True)
        optim = spec.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LR,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def __call__(self) -> float:
        """One step; its loss."""
        logits = self.model(input_ids=self.x, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), self.y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / WORLD
        dist.all_reduce(mean)  # a loop that prints the loss of the global batch
        return float(mean)


def main(number: int, port: int, rounds: int, what: str) -> None:
    """One rank. Rank 0 writes the result."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=WORLD)
    rank = Rank(number, WORLD, number, torch.device("cpu"), "gloo", "127.0.0.1", dist.new_group(backend="gloo"), ())
    spec = job(what)
    drawn = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (WORLD * SEQUENCES[what], spec.model.context + 1), generator=drawn)
    own = tokens.chunk(WORLD)[number]
    variants: dict[str, Callable[[], float]] = {"raydist": Ours(rank, spec, own), "transformers": Theirs(spec, own)}
    first = {name: step() for name, step in variants.items()}
    assert max(first.values()) - min(first.values()) < 1e-5 * min(first.values()), first
    wall, processor = interleaved(variants, rounds, dist.barrier)
    if number == 0:
        result: dict[str, Any] = {
            "rounds": rounds,
            "load_average": os.getloadavg()[1],
            "transformers": transformers.__version__,
            "model": spec.model.model_dump(mode="json", exclude_defaults=True),
            "sequences_of_a_rank": SEQUENCES[what],
        }
        for kind, times in (("speed", wall), ("processor_time", processor)):
            pairs = zip(times["transformers"], times["raydist"], strict=True)
            ratios = [theirs / ours if kind == "speed" else ours / theirs for theirs, ours in pairs]
            result[f"{kind}_over_transformers"] = round(statistics.median(ratios), 4)
            result[f"{kind}_ratios"] = [round(ratio, 4) for ratio in ratios]
        result["tokens_per_second"] = {
            name: round(tokens[:, 1:].numel() / statistics.median(times), 1) for name, times in wall.items()
        }
        print(result)
        print(write(f"decoders_{what}", result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=SEQUENCES)
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    for what in [asked.what] if asked.what else SEQUENCES:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        mp.spawn(main, (free_port, asked.rounds, what), nprocs=WORLD)
