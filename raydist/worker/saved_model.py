"""A saved model in one process: of a run's checkpoint, or of an exported folder; with its held-out loss.

Runs in: commands (`raydist sample`, `raydist eval`, `raydist checkpoint export --quantize`), on the CPU. Torch, never ray.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor, nn

from raydist import registry
from raydist.checkpoint.huggingface import check
from raydist.data.dataset import TokenDataset
from raydist.data.tokenizers import Library, Tokenizer
from raydist.errors import CheckpointNotFound, UserError
from raydist.redact import beside
from raydist.run.directory import SPEC, RunDir
from raydist.spec import JobSpec, ModelSpec, parse
from raydist.spec.huggingface import need, reader_of
from raydist.worker import int8
from raydist.worker.checkpoint import restore
from raydist.worker.dataloader import Feed
from raydist.worker.distributed import Rank
from raydist.worker.loss import build as build_loss
from raydist.worker.mesh import Mesh
from raydist.worker.parallel._model_graph import initialise
from raydist.worker.pretrained import leave_empty

ALONE = Rank(0, 1, 0, torch.device("cpu"), "gloo", "127.0.0.1", None, ())


@dataclass(frozen=True, slots=True)
class SavedModel:
    """`module`: in evaluation mode. `end`: the id that ends a document. `nbytes`: of its values as they are in memory."""

    module: nn.Module
    spec: ModelSpec
    tokenizer: Tokenizer
    end: int

    @property
    def nbytes(self) -> int:
        """Of parameters and persistent buffers, a tied one once."""
        return sum({t.data_ptr(): t.nbytes for t in self.module.state_dict().values()}.values())


def of_run(
    run: RunDir, step: int | None = None, dataset: str | None = None
) -> tuple[SavedModel, JobSpec, TokenDataset]:
    """The model of a checkpoint, its job and its data. `step`: None takes the newest good one. `dataset`: where the data is, if it
    has moved. Raises CheckpointNotFound, CheckpointCorrupt, DataError."""
    job = parse(yaml.safe_load(run.storage.read(SPEC)), source=f"{run.uri}/{SPEC}")
    manifest = restore.choose(run, step=step)
    if manifest is None:
        raise CheckpointNotFound(
            f"run {run.name} has no checkpoint yet", "train it to its first checkpoint (checkpoint.every)"
        )
    data = TokenDataset(dataset or beside(str(manifest.plain["dataset"]), run.full_uri))
    module: nn.Module = registry.load("model", job.model.name)(job.model, job.model.rows(data.vocab_size))
    restore.load(run, manifest, {f"model/{n}": t for n, t in module.state_dict().items()}, {})
    return SavedModel(module.eval(), job.model, data.tokenizer, data.end), job, data


@torch.no_grad()
def of_folder(folder: Path) -> SavedModel:
    """The model of a folder in Hugging Face's format, or of an int8 export, with its tokenizer. Raises UserError."""
    file = folder / "config.json"
    try:
        config: Any = json.loads(file.read_bytes())
        quantized = config.pop("quantization_config", None)
        name, format = reader_of(config)
        spec = ModelSpec(name=name, hf=str(folder), vocab_size=need(config, "vocab_size"), **format.fields(config))
    except (OSError, ValueError, AttributeError, ValidationError) as error:  # UserError is a ValueError
        raise UserError(
            f"{file}: {getattr(error, 'message', error)}", "give a folder in Hugging Face's format"
        ) from None
    if quantized is not None and quantized.get("quant_method") != int8.METHOD:
        raise UserError(f"{file}: quantization_config: {quantized.get('quant_method')!r} is not computed here",
                        f"{int8.METHOD} is: raydist checkpoint export --quantize int8")  # fmt: skip
    raw = folder / "tokenizer.json"
    if not raw.exists():
        raise UserError(f"{raw}: is missing", "copy the tokenizer.json of the model there")
    tokenizer = Library(str(raw), raw.read_bytes())
    rows = spec.rows(tokenizer.vocab_size)
    with torch.device("meta"):
        module: nn.Module = registry.load("model", name)(spec, rows)
    as_int8 = int8.with_int8_layers(module) if quantized is not None else set[str]()
    leave_empty(module)
    for _ in initialise(module):
        pass
    shapes = format.shapes(spec, rows)
    files = check(folder, spec, format, shapes, as_int8)
    held = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    with ExitStack() as stack:
        opened = {
            f: stack.enter_context(safe_open(folder / f, framework="pt")) for f in {t.file for t in files.values()}
        }
        for parameter, shape in shapes.items():
            for piece in format.pieces(parameter, shape):
                _fill(held[parameter], opened[files[piece.name].file].get_tensor(piece.name), piece.at)
                if parameter in as_int8:
                    scales = opened[files[piece.name + int8.SCALE].file].get_tensor(piece.name + int8.SCALE)
                    _fill(held[parameter.removesuffix("weight") + "scale"], scales, piece.at)
    return SavedModel(module.eval(), spec, tokenizer, tokenizer.end)


def _fill(into: Tensor, values: Tensor, at: tuple[int | slice, ...]) -> None:
    into[at].copy_(values)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`loss`: nats per token, the mean over `tokens` of held-out text. `tokens_per_second`: of this process on the CPU."""

    loss: float
    tokens: int
    tokens_per_second: float


@torch.no_grad()
def evaluate(module: nn.Module, job: JobSpec, data: TokenDataset) -> Evaluation:
    """The held-out loss that a run's evaluation would give: the same samples and the same loss. Raises DataError."""
    loss, total, tokens = build_loss(job), 0.0, 0
    batches = Feed(job, Mesh(ALONE), data).eval_set()
    begun = time.perf_counter()
    for batch in batches:
        total += loss(module, batch).item()
        tokens += int((batch.targets >= 0).sum())
    seconds = time.perf_counter() - begun
    return Evaluation(total / max(tokens, 1), tokens, tokens / seconds)


def job_of(model: ModelSpec, data: Mapping[str, Any], batches: int, global_batch: int) -> JobSpec:
    """A job to evaluate a folder's model with."""
    fields = {"model": model.model_dump(mode="json"), "data": dict(data)}
    train = {"steps": 1, "global_batch": global_batch, "micro_batch": 1}
    return parse({**fields, "train": train, "eval": {"batches": batches}}, source="raydist eval")
