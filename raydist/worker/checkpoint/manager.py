"""How far a run has come, and all that keeps it: checkpoints on storage, their replicas, snapshots in memory.

Runs in: each train worker. Torch, never ray.

    resume()   from a snapshot, or the newest good checkpoint, or nothing -> Progress
    save()     a checkpoint (checkpoint/save.py); snapshot(): a copy in memory (checkpoint/memory_manager.py); both beside the next
    step
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from raydist.checkpoint.mirrors import Mirrors
from raydist.data.batches import Cursor
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import RunDir, resume_attempt, step_folder
from raydist.spec import spec_hash
from raydist.worker import distributed
from raydist.worker.attempt import Job
from raydist.worker.checkpoint import memory_manager as memory_stores
from raydist.worker.checkpoint import numbers, restore
from raydist.worker.checkpoint.memory_manager import MemoryCheckpointer
from raydist.worker.checkpoint.save import RETRY_S, Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.checks.replicas import ReplicaCheck
from raydist.worker.distributed import Rank
from raydist.worker.metrics.gradient_noise_scale import GradientNoise
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.precision import Precision


@dataclass(slots=True)
class Progress:
    """After `step` steps; `cursor`: of the batch that comes next. Losses: of the newest step, where that was finite, of the newest
    evaluation, and the best; None without one. `evaluated`: the step of this attempt's newest evaluation; 0 before it.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    loss: float | None = None
    eval_loss: float | None = None
    best_eval: float | None = None
    evaluated: int = 0

    def to_plain(self) -> dict[str, Any]:
        """For the plain state of a checkpoint."""
        losses = {"loss": self.loss, "eval_loss": self.eval_loss, "best_eval": self.best_eval}
        return {"step": self.step, "cursor": self.cursor.to_dict(), **losses}

    def load(self, plain: Mapping[str, Any]) -> None:
        """The inverse of `to_plain`."""
        self.step, self.cursor = int(plain["step"]), Cursor.from_dict(plain["cursor"])
        self.loss, self.eval_loss, self.best_eval = plain["loss"], plain["eval_loss"], plain["best_eval"]


class CheckpointManager:
    """Of one attempt. Every rank makes one, and calls `resume`, `open` and then the others at the same steps: they are collectives,
    where nothing else is said. `fingerprint`: the dataset's; `total`: optimizer steps of the whole run. `watch`: what it is to ask
    before it saves.
    """

    def __init__(
        self,
        job: Job,
        rank: Rank,
        reporter: Reporter | None,
        progress: Progress,
        state: TrainState,
        *,
        precision: Precision,
        bad_steps: BadStepCheck,
        noise: GradientNoise | None,
        fingerprint: str,
        total: int,
        steps_per_epoch: int,
    ) -> None:
        self._job, self._spec, self._rank, self._reporter = job, job.spec, rank, reporter
        self._progress, self._state, self._numbers = progress, state, job.spec.numbers(fingerprint)
        self._total, self._steps_per_epoch = total, steps_per_epoch
        self._precision, self._bad_steps, self._noise = precision, bad_steps, noise
        self.watch: ReplicaCheck | None = None
        self._saving = False

    def resume(self) -> bool:
        """Takes up the snapshot that the driver named, or the newest checkpoint whose every hash is right, from a replica if
        need be; at any world size. Whether there was one.
        """
        rank, run, job = self._rank, self._job.run, self._job
        common: dict[str, Any] = {
            "rank": rank.rank,
            "world_size": rank.world_size,
            "group": rank.control,
            "on_event": self._reporter.event if self._reporter else lambda event: None,
        }
        place, manifest, source = run, None, "memory"
        if job.memory_store is not None:
            place, manifest = RunDir(job.memory_store.folder), memory_stores.choose(job.memory_store, **common)
        if manifest is None:
            source = "storage"
            chosen = restore.choose_from(run, self._spec.checkpoint.replicas, **common)
            place, manifest = chosen if chosen is not None else (run, None)
        self._bad_steps.resume(manifest.plain if manifest else {})
        if rank.first and job.attempt in run.lineage().begun:
            resume_attempt(run, job.attempt, manifest.step if manifest else 0)
        if manifest is None:
            return False
        numbers.check(run.name, manifest, self._numbers, self._total, job.allow_spec_change)
        tensors, rank_tensors, _ = self._state.capture()
        exact = restore.load(place, manifest, tensors, rank_tensors, group=rank.control)
        self._state.restore(tensors, rank_tensors if exact else None, manifest.plain)
        self._progress.load(manifest.plain)
        self._precision.load(manifest.plain["precision"])
        if self._noise:
            self._noise.load(manifest.plain.get("noise", {}))
        if not exact:  # another world size: each rank draws from a stream of its own, never one that was used before
            seed, step = self._spec.train.seed, self._progress.step
            distributed.seed_all(seed, "dropout", rank.rank, rank.world_size, step)
        if self._reporter:
            self._reporter.say(
                "resumed",
                step=self._progress.step,
                path=step_folder(self._progress.step),
                source=source,
                attempt=job.attempt,
                world_size=rank.world_size,
            )
            if change := numbers.schedule_change(manifest, self._spec, self._total, self._steps_per_epoch):
                self._reporter.say("note", text=change)
        return True

    def open(self) -> None:
        """Makes ready to save, from the step that it has resumed at."""
        job, rank, spec, reporter = self._job, self._rank, self._spec.checkpoint, self._reporter
        self._replicas = (
            Mirrors(
                job.run,
                spec.replicas,
                keep=spec.keep,
                attempt=job.attempt,
                verify_every=spec.verify_every,
                on_event=reporter.event,
            )
            if reporter
            else None
        )
        common: dict[str, Any] = {
            "rank": rank.rank,
            "world_size": rank.world_size,
            "group": rank.control,
            "attempt": job.attempt,
            "spec_hash": spec_hash(job.spec),
            "numbers": self._numbers,
        }
        self._saver = Saver(
            job.run,
            asynchronous=spec.asynchronous,
            keep=spec.keep,
            on_event=self._saved,
            before_commit=reporter.flush if reporter else None,
            max_failures=spec.max_failures,
            timeout_s=spec.timeout_s,
            **common,
        )
        self._memory_store: MemoryCheckpointer | None = None
        every, resumed = job.spec.snapshot_every, self._progress.step
        if job.memory_store is not None and every is not None:
            told = reporter.told if reporter else None  # a restart from memory must find the records up to there
            tell = reporter.event if reporter else lambda event: None
            self._memory_store = MemoryCheckpointer(
                job.memory_store, every, resumed=resumed, before_commit=told, on_event=tell, **common
            )

    def prepare(self) -> None:
        """Memory for the copies, beside the next step; after the first one, when the optimizer has its state."""
        state = self._state.capture()[:2]
        self._saver.prepare(*state)
        if self._memory_store:
            self._memory_store.prepare(*state)  # there is memory on all nodes, or none takes any

    def vote(self, due: bool) -> float:
        """This rank's word on a snapshot after this step, see `MemoryCheckpointer.vote`; `due`: a checkpoint comes there. No
        collective."""
        return self._memory_store.vote(self._progress.step, due) if self._memory_store else 0.0

    def stepped(self, seconds: float, unusual: bool) -> None:
        """A step took so long since the one before; `unusual`: something else went on beside it. No collective."""
        if self._memory_store:
            self._memory_store.stepped(seconds, unusual or self._saver.busy)

    def before_update(self) -> None:
        """Waits until no copy of the state is being taken. No collective."""
        self._saver.before_update()
        if self._memory_store:
            self._memory_store.before_update()

    def save(self, ending: bool) -> None:
        """A checkpoint of this step: each rank writes its part, rank 0 commits, last. `ending`: no step may take its place."""
        self._saving = True
        step, loss = self._progress.step, self._progress.eval_loss
        if not self._saver.start(step, *self._capture(), last=ending):
            return
        if self._memory_store:
            self._memory_store.checkpoint(step)
        if loss is not None and self._progress.evaluated == step:
            self._saver.mark_eval(step, loss)

    def snapshot(self) -> None:
        """A copy of this step's state to memory, where the votes said so."""
        assert self._memory_store is not None
        self._memory_store.start(self._progress.step, *self._capture())

    def finish(self) -> None:
        """Returns once what was saved is committed, and copied. Raises SavesFailed after checkpoint.max_failures in a row."""
        while self._saving and not self._saver.wait():
            time.sleep(RETRY_S)  # the last one failed, and the run must not end without it
            self.save(ending=True)
        if self._replicas:
            self._replicas.close(self._spec.checkpoint.timeout_s)

    def close(self) -> None:
        """Ends what is on its way; after `finish`, nothing is. No collective."""
        if self._replicas:
            self._replicas.close(0.0)
        self._saver.close()
        if self._memory_store:
            self._memory_store.close()

    # --- inside

    def _capture(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """All that a checkpoint of this step is made of: tensors, this rank's tensors, plain values."""
        step = self._progress.step
        if self.watch:
            self.watch.before_save(step)
        tensors, rank_tensors, plain = self._state.capture()
        plain |= {
            **self._progress.to_plain(),
            "precision": self._precision.state(),
            "dataset": redact(self._job.dataset),
            "noise": self._noise.state() if self._noise else {},
            **self._bad_steps.state(step),
        }
        return tensors, rank_tensors, plain

    def _saved(self, event: Event) -> None:
        """What the Saver tells, on rank 0."""
        if self._reporter and self._replicas:
            self._reporter.event(event)
            if event.kind == "checkpoint_saved":
                self._replicas.committed()
