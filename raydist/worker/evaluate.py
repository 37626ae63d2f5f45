"""The held-out loss of a model in one process, and its speed: for exported weights, before and after they are quantised.

Runs in: `raydist evaluate` and `raydist checkpoint export --quantize`. Torch, never ray.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from raydist.data.batches import MASKED, MicroBatch
from raydist.data.dataset import TokenDataset
from raydist.errors import DataError
from raydist.spec import JobSpec, ModelSpec
from raydist.worker.dataloader import Feed
from raydist.worker.distributed import Rank
from raydist.worker.exported import Exported
from raydist.worker.loss import Loss
from raydist.worker.loss import build as build_loss
from raydist.worker.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`loss`: the mean over `tokens`, in nats. `tokens_per_second`: of passes without gradients."""

    loss: float
    tokens: int
    tokens_per_second: float


def device() -> torch.device:
    """Where this process evaluates: the first GPU, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def batches_of(job: JobSpec, dataset: TokenDataset) -> list[MicroBatch]:
    """All held-out batches that a job evaluates, on `device()`. Raises DataError if there are none."""
    alone = Rank(0, 1, 0, device(), "gloo", "127.0.0.1", None, ())
    return Feed(job, Mesh(alone), dataset).eval_set()


def job_of(model: ModelSpec, dataset: TokenDataset, batches: int, sequences: int) -> JobSpec:
    """The job of an evaluation without a run: so many batches of so many sequences. A conversation is a sequence of its own, as in
    training by `data.batching`."""
    apart = {} if dataset.index.chat is None else {"batching": {"max_tokens": sequences * model.context}}
    return JobSpec.model_validate(
        {
            "model": model,
            "data": {"path": dataset.storage.full_uri, **apart},
            "train": {"steps": 1, "global_batch": sequences, "micro_batch": sequences},
            "eval": {"batches": batches},
        }
    )


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Sequence[MicroBatch], loss: Loss) -> Evaluation:
    """The loss over all batches. The first one is computed twice, and not timed the first time."""
    model.to(device()).eval()
    total, tokens, seconds = 0.0, 0, 0.0
    for i, batch in enumerate([batches[0], *batches]):
        begun = time.perf_counter()
        summed = float(loss(model, batch))  # waits for the device
        if i:
            seconds += time.perf_counter() - begun
            total += summed
            tokens += int((batch.targets != MASKED).sum())
    return Evaluation(total / max(tokens, 1), tokens, tokens / max(seconds, 1e-9))


def evaluate_folder(exported: Exported, dataset: TokenDataset, batches: int, sequences: int) -> Evaluation:
    """The loss of an exported folder on a prepared dataset. Raises DataError if that has another tokenizer."""
    from tokenizers import Tokenizer

    from raydist.worker.checkpoint.export import tokenizer_files

    own = str(exported.tokenizer().to_bytes().decode())
    data = tokenizer_files(dataset, exported.spec.context)["tokenizer.json"].decode()
    if Tokenizer.from_str(own).to_str() != Tokenizer.from_str(data).to_str():
        raise DataError(
            f"{dataset.uri} was prepared with another tokenizer ({dataset.tokenizer.name}) than {exported.folder}",
            f"raydist data prepare ... --tokenizer {exported.folder}/tokenizer.json",
        )
    job = job_of(exported.spec, dataset, batches, sequences)
    return evaluate(exported.model, batches_of(job, dataset), build_loss(job))
