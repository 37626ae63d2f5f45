"""The model of a checkpoint as one module in this process, for commands that run it.

Runs in: the user's shell. Torch, never ray.
"""

from __future__ import annotations

from torch import nn

from raydist.checkpoint import base_weights
from raydist.checkpoint.base_weights import BASE
from raydist.checkpoint.manifest import Manifest
from raydist.data.dataset import TokenDataset
from raydist.errors import CheckpointNotFound, UserError
from raydist.redact import beside
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, read_stored
from raydist.spec.script import SESSION
from raydist.storage import Storage
from raydist.worker import pretrained
from raydist.worker.build import build_model
from raydist.worker.checkpoint import restore
from raydist.worker.lora import frozen_shards


def newest_model(run: RunDir, step: int | None = None) -> tuple[nn.Module, TokenDataset, JobSpec]:
    """The model of the newest checkpoint, or of that of `step`, with the run's data and job. Raises CheckpointNotFound."""
    spec = read_stored(run.storage)
    manifest = restore.choose(run, step=step)
    if manifest is None:
        raise CheckpointNotFound(
            f"run {run.name} has no checkpoint yet", "train it to its first checkpoint (checkpoint.every)"
        )
    if spec.model.name == SESSION:
        raise UserError(
            f"run {run.name}: a script made it, and has its model", f"its weights: raydist.open({run.uri!r}).weights()"
        )
    dataset = TokenDataset(beside(str(manifest.plain["dataset"]), run.full_uri))
    return restored_model(run, manifest, spec, dataset.vocab_size), dataset, spec


def restored_model(run: RunDir, manifest: Manifest, spec: JobSpec, vocab_size: int) -> nn.Module:
    """The model of a chosen checkpoint, for evaluation. Adapters get the weights that they are for from `model.hf`.

    Raises UserError and CheckpointError if these are not the weights that the adapters were trained on.
    """
    options = spec.model.options
    if spec.model.name == "transformers" and isinstance(options.get("config"), dict):
        # The weights that the run started from are not read again: the checkpoint has all of them.
        spec = spec.with_fields({"model.options": {**options, "weights": None}})
    model = build_model(spec, vocab_size)
    base: set[str] = set()
    if spec.model.lora is not None:
        hf = Storage(beside(str(spec.model.hf), run.full_uri))
        base_weights.check(manifest.plain.get(BASE), {"hf": hf.uri, "fingerprint": base_weights.fingerprint(hf)})
        frozen = frozen_shards(model)
        pretrained.load(spec.model.model_copy(update={"hf": hf.full_uri}), model, frozen, vocab_size)
        names = {id(p) for n, p in model.named_parameters() if n in frozen}
        base = {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in names}
    restore.load(run, manifest, {f"model/{n}": t for n, t in model.state_dict().items() if n not in base}, {})
    return model.eval()
