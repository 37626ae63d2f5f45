"""The checkpoint of another run whose weights a run starts from (`init_from`): found, and compared with the job's model.

Runs in: the driver, before any worker starts. Never torch. The ranks check its hashes and read it (worker/checkpoint/manager.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import Manifest
from raydist.errors import CheckpointError, UserError
from raydist.run.directory import RunDir, resolve, step_folder
from raydist.spec import JobSpec, read_stored
from raydist.spec.huggingface import format_of

MODEL = "model/"
"""The prefix of the model's tensors in a checkpoint."""
SHOWN = 8

_CHECKPOINT = re.compile(r"(?P<run>.+)/checkpoints/step-(?P<step>\d+)/?(?P<query>\?.*)?")


def split(name: str) -> tuple[str, int | None]:
    """(run, step) of RUN/checkpoints/step-N; (name, None) of a run alone."""
    match = _CHECKPOINT.fullmatch(name)
    return (match["run"] + (match["query"] or ""), int(match["step"])) if match else (name, None)


def pinned(job: JobSpec, own: RunDir, storage: str, fresh: bool = False) -> JobSpec:
    """`job` with the URI of one checkpoint in `init_from`, so that all attempts start from the same weights.

    `own`: the run itself. Once it has a checkpoint, the source is not looked at, and stays what spec.yaml says; `fresh`: its
    checkpoints will be deleted. `storage`: the folder of the runs, for a source by name. Raises UserError if there is no such
    checkpoint, or if its tensors are others.
    """
    if not fresh and own.exists() and own.committed():
        recorded = read_stored(own.storage).init_from
        return job.model_copy(update={"init_from": recorded})
    if job.init_from is None:
        return job
    name, step = split(job.init_from)
    try:
        run = resolve(name, storage)
        found = manifest.read_newest(run) if step is None else manifest.read(run, step)
    except (CheckpointError, UserError) as error:
        raise UserError(f"init_from: {error.message}", error.hint) from None
    if run.uri == own.uri:
        raise UserError(f"init_from: {run.uri} is this run itself", "give the new run another --name")
    if found is None:
        raise UserError(
            f"init_from: run {run.name} has no checkpoint that can be read",
            "train it up to its first one (checkpoint.every)",
        )
    _check(job, run, found)
    return job.model_copy(update={"init_from": run.storage.at(step_folder(found.step)).full_uri})


def _check(job: JobSpec, run: RunDir, found: Manifest) -> None:
    """Raises UserError for a model with other tensors, as far as that is known without torch: for the families of Hugging Face."""
    format, saved = format_of(job.model.name), weights_of(found)
    if format is None or "embedding.weight" not in saved:
        return
    rows = job.model.vocab_size or saved["embedding.weight"][0]  # those of the tokenizer, which only the data knows
    wanted = dict(format.shapes(job.model, rows))
    if job.model.tie_embeddings:
        saved.pop("head.weight", None)
        wanted.pop("head.weight", None)
    if problems := differences(saved, wanted) + untied(found, job):
        raise others(f"init_from: {run.uri} at step {found.step}", problems)


def weights_of(found: Manifest) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the model's tensors in a checkpoint."""
    return {n.removeprefix(MODEL): entry.shape for n, entry in found.tensors.items() if n.startswith(MODEL)}


def differences(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A line for each tensor that is missing, surplus or of another shape."""
    lines = [f"{name}: is not in the checkpoint" for name in wanted if name not in saved]
    for name, shape in saved.items():
        if name not in wanted:
            lines.append(f"{name}: the model has no such tensor")
        elif tuple(wanted[name]) != tuple(shape):
            lines.append(f"{name}: {list(shape)} in the checkpoint, {list(wanted[name])} by the job's model")
    return lines


def untied(found: Manifest, job: JobSpec) -> list[str]:
    """A line if the checkpoint has an embedding and another head, and the job's model has one tensor for both."""
    if not job.model.tie_embeddings or found.numbers.get("model.tie_embeddings", True):
        return []
    return ["head.weight: another tensor than embedding.weight in the checkpoint, and the same one in the job's model"]


def others(what: str, problems: list[str]) -> UserError:
    """The error for a checkpoint with other tensors than the model's."""
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return UserError(
        f"{what}: the tensors are not those of the job's model:\n    " + "\n    ".join(problems[:SHOWN] + more),
        "give `model` the fields of that run's spec.yaml",
    )
