"""Rank 0's part of a save: checks that all names are covered, writes the manifest, deletes old checkpoints, stores eval losses.

Runs in: rank 0's process, in the side thread of its save. Imports no torch.distributed: it sends nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raydist import __version__
from raydist.checkpoint import manifest, retention
from raydist.checkpoint.coverage import sentence, uncovered
from raydist.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from raydist.errors import CheckpointError, Fenced, StorageError
from raydist.parsing import size
from raydist.run.directory import ATTEMPTS, RunDir, fenced, manifest_name
from raydist.worker import numerics

Say = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What all manifests of an attempt contain. `mesh`: axis -> size; {}: all ranks are data parallel."""

    world_size: int
    mesh: Mapping[str, int]
    attempt: int
    spec_hash: str
    numbers: dict[str, Any]


class Committer:
    """Writes manifests of one attempt. `keep`: newest checkpoints that stay, besides the best. `say(kind, **data)` reports an
    event.

    `noted`: whether the attempt's own note is in the run's folder; a commit is refused where it is missing later.
    """

    def __init__(self, run: RunDir, facts: Facts, *, keep: int, noted: bool, say: Say) -> None:
        self._run, self._facts, self._keep, self._noted, self._say = run, facts, keep, noted, say
        self._evals: dict[int, float] = {}
        self._known: manifest.Known = {}
        self._last: manifest.Known = {}
        self.evals_lock = threading.Lock()
        """Held while a save ends, so that an eval loss is either in its manifest or stored beside it."""

    def commit(
        self,
        step: int,
        files: dict[str, FileEntry],
        tensors: dict[str, TensorEntry],
        plain: dict[str, Any],
        wanted: Mapping[str, tuple[int, ...]],
    ) -> int:
        """Writes the manifest; gives the bytes of all shards. Raises CheckpointError if a tensor of `wanted` (name -> shape) is not
        covered, Fenced if a newer attempt has begun, StorageError.
        """
        check_coverage(wanted, {n: (t.shape, [(c.offsets, c.sizes) for c in t.chunks]) for n, t in tensors.items()})
        with self.evals_lock:
            eval_loss = self._evals.pop(step, None)
        made = Manifest(
            step=step,
            world_size=self._facts.world_size,
            attempt=self._facts.attempt,
            saved_at=time.time(),
            spec_hash=self._facts.spec_hash,
            files=files,
            tensors=tensors,
            plain=plain,
            numbers=self._facts.numbers,
            versions={"raydist": __version__, **numerics.own()},
            eval_loss=eval_loss,
            mesh=dict(self._facts.mesh),
        )
        where = manifest.path(step, manifest_name(self._facts.attempt))
        text = made.dumps()
        if len(text) > manifest.MOST_BYTES:
            raise CheckpointError(
                f"{self._run.uri}/{where} would have {size(len(text))}: nobody reads more than {size(manifest.MOST_BYTES)}",
                "shard over fewer ranks (parallel.strategy: hsdp)",
            )
        self._run.storage.write(where, text, check=self.refuse_if_fenced)
        self._last = {where: manifest.facts(made)}
        return made.nbytes

    def refuse_if_fenced(self) -> None:
        """Raises Fenced if a newer attempt has begun, StorageError if the run's notes are missing."""
        newest = self._run.lineage().newest
        if self._noted and newest == 0:
            # Not fenced, but gone: an unmounted folder takes files all the same, and they are lost with it.
            raise StorageError(f"{self._run.uri}/{ATTEMPTS}: the run's notes are gone", "is the storage mounted?")
        if newest not in (0, self._facts.attempt):
            raise Fenced(
                f"attempt {self._facts.attempt} may not commit: attempt {newest} has begun",
                "a newer attempt has replaced this one, and its processes should end",
            )

    def is_best(self, step: int) -> bool:
        """Whether `step` has the best eval loss of all committed checkpoints."""
        try:
            self._known.update(self._last)
            return manifest.best(self._run, self._known) == step
        except StorageError:
            return False  # the step was committed; that storage has failed since is reported by the next save

    def delete_old(self, step: int) -> None:
        """Deletes old checkpoints after the commit of `step`. A failure costs disk space, and no checkpoint: it is reported."""
        try:
            if fenced(self._run, self._facts.attempt):
                return  # another attempt decides now
            retention.sweep(self._run, manifest.read(self._run, step, tensors=False))
            retention.prune(self._run, self._keep, orphans=True, attempt=self._facts.attempt, known=self._known)
        except Exception as error:
            self._say("note", text=f"old checkpoints could not be deleted: {type(error).__name__}: {error}")

    def keep_eval(self, step: int, loss: float) -> None:
        """Keeps an eval loss for the manifest of `step`, or for `store_eval`. The caller holds `evals_lock`."""
        self._evals[step] = loss

    def store_eval(self, step: int) -> None:
        """Writes the kept eval loss of a committed checkpoint beside its manifest. A failure is reported."""
        with self.evals_lock:
            loss = self._evals.pop(step, None)
        try:
            if loss is not None and self._run.manifest(step) is not None:
                manifest.write_eval(self._run, step, loss)
        except Exception as error:
            self._say("note", text=f"the eval loss of step {step} could not be stored: {type(error).__name__}: {error}")


def check_coverage(wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]) -> None:
    """Raises CheckpointError that names what of `wanted` (name -> shape) is not covered by `saved` (name -> (shape, boxes))."""
    if problems := uncovered(wanted, saved):
        raise CheckpointError(
            f"the checkpoint would be incomplete: {sentence(problems)}",
            "every rank must save the tensors that it alone holds; ranks with parts of one tensor have DTensors of it",
        )
