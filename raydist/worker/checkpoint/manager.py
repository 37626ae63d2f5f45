"""The progress of a run, and everything that saves it: checkpoints on storage, their replicas, snapshots in memory.

Runs in: each train worker. Torch, never ray.

    resume()     from a snapshot, the newest good checkpoint, or nothing -> Progress
    save()       a checkpoint on storage (save.py), while the next step runs
    snapshot()   a copy in memory (memory_manager.py), while the next step runs
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from raydist.checkpoint import base_weights
from raydist.checkpoint.base_weights import BASE
from raydist.checkpoint.interval import CheckpointInterval
from raydist.checkpoint.mirrors import Mirrors
from raydist.checkpoint.source import MODEL, differences, others, split, untied, weights_of
from raydist.data.batches import Cursor
from raydist.errors import UserError
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import RunDir, resume_attempt, step_folder
from raydist.spec import spec_hash
from raydist.worker import numerics
from raydist.worker.attempt import Job
from raydist.worker.checkpoint import memory_manager as memory_stores
from raydist.worker.checkpoint import numbers, restore
from raydist.worker.checkpoint.extra_state import EXTRA, ExtraState
from raydist.worker.checkpoint.memory_manager import MemoryCheckpointer
from raydist.worker.checkpoint.save import RETRY_S, Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.checks.bad_steps import BadStepCheck
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.gradient_noise_scale import GradientNoise
from raydist.worker.metrics.reporter import UNSENT, Reporter
from raydist.worker.parameter_table import ParameterTable, gather_tensors
from raydist.worker.precision import Precision


@dataclass(slots=True)
class Progress:
    """The state of a run after `step` steps. `cursor`: of the next batch. Losses: the newest finite one of a step, of the newest
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
    """Saves and restores one attempt. Every rank makes one, and calls `register`, `resume`, `open` and then the others at the same
    steps: they are collectives, unless their docstring says otherwise. `parameters`: a commit without all of them fails. `mesh`:
    None: all ranks are data parallel. `fingerprint`: the dataset's; `total`: optimizer steps of the whole run. `base`: the weights
    that adapters are for (BASE), which checkpoints name and do not hold.
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
        parameters: ParameterTable | None = None,
        mesh: Mesh | None = None,
        base: dict[str, Any] | None = None,
    ) -> None:
        self._job, self._spec, self._rank, self._reporter = job, job.spec, rank, reporter
        self._progress, self._state, self._numbers = progress, state, job.spec.numbers(fingerprint)
        self._total, self._steps_per_epoch = total, steps_per_epoch
        self._precision, self._bad_steps, self._noise = precision, bad_steps, noise
        self._parameters, self._mesh, self._base = parameters, mesh or Mesh(rank), base
        self._saving = False
        self._committed: deque[int] = deque()

    def register(self, name: str, state: ExtraState) -> None:
        """Saves and restores this state too: see extra_state.py. Before `resume`. No collective."""
        self._state.register(name, state)

    def resume(self) -> bool:
        """Loads the snapshot that the driver named, or the newest checkpoint whose hashes are all right, from a replica if needed,
        on any mesh. Whether there was one.
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
        if self._reporter and self._spec.train.virtual_ranks is not None:
            for line in numerics.changed(manifest.versions):
                self._reporter.say("note", text=line)
        base_weights.check(manifest.plain.get(BASE), self._base)
        tensors, rank_tensors, _ = self._state.capture()
        loaded = restore.load(
            place,
            manifest,
            tensors,
            rank_tensors,
            group=rank.control,
            mesh=self._mesh.sizes,
            extra=self._state.extra,
            joins=self._state.joins,
        )
        self._state.restore(tensors, rank_tensors, manifest.plain, restored=loaded.extra)
        self._progress.load(manifest.plain)
        self._precision.load(manifest.plain["precision"])
        if self._noise:
            self._noise.load(manifest.plain.get("noise", {}))
        if self._reporter:
            self._reporter.say(
                "resumed",
                step=self._progress.step,
                path=step_folder(self._progress.step),
                source=source,
                attempt=job.attempt,
                world_size=rank.world_size,
            )
            if UNSENT in manifest.plain:
                self._reporter.resend(manifest.plain[UNSENT], job.attempt)
            if change := numbers.schedule_change(manifest, self._spec, self._total, self._steps_per_epoch):
                self._reporter.say("note", text=change)
            for name, why in loaded.anew.items():
                self._reporter.say("note", text=f"extra state {name} starts from its initial value: it {why}")
            for name in sorted(loaded.partly):
                why = "its tensors that were saved with other shapes start from their initial values"
                self._reporter.say("note", text=f"extra state {name}: {why}")
            for name in sorted(manifest.plain.get(EXTRA, {}).keys() - set(self._state.extra)):
                self._reporter.say("note", text=f"extra state {name} of the checkpoint is not used by this job")
        return True

    def start_from(self, source: str) -> None:
        """Loads the weights of another run's checkpoint, on any mesh, and nothing else of it. After `resume` gave False.

        `source`: see `raydist.checkpoint.source.split`. Raises UserError, on every rank, if its tensors are others than the
        model's; CheckpointCorrupt if a hash is wrong.
        """
        rank = self._rank
        name, step = split(source)
        run = RunDir(name)
        found = restore.choose(run, step=step, rank=rank.rank, world_size=rank.world_size, group=rank.control)
        if found is None:
            raise UserError(
                f"init_from: {run.uri} has no checkpoint", "train it up to its first one (checkpoint.every)"
            )
        base_weights.check(found.plain.get(BASE), self._base)
        weights = self._state.weights()
        table = gather_tensors(weights, rank.rank, rank.control)
        wanted = {n.removeprefix(MODEL): row.shape for n, row in table.items()}
        if problems := differences(weights_of(found), wanted) + untied(found, self._spec):
            raise others(f"init_from: {run.uri} at step {found.step}", problems)
        restore.load(run, found, weights, {}, group=rank.control)
        self._state.take_buffers(weights)
        if self._reporter:
            self._reporter.say("weights_loaded", source=redact(source), run=run.name, step=found.step)

    def open(self) -> None:
        """Prepares saves, after `resume`."""
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
            "mesh": self._mesh.sizes,
            "parameters": self._parameters,
        }
        self._saver = Saver(
            job.run,
            asynchronous=spec.asynchronous,
            keep=spec.keep,
            on_event=self._saved,
            before_commit=reporter.before_commit if reporter else None,
            max_failures=spec.max_failures,
            timeout_s=spec.timeout_s,
            **common,
        )
        self._memory_store: MemoryCheckpointer | None = None
        every, resumed = job.spec.snapshot_every, self._progress.step
        self._interval = CheckpointInterval(spec.every, resumed, spec.mtbf_h * 3600 / self._rank.world_size)
        if job.memory_store is not None and every is not None:
            # A restart from memory must find the records of the steps before it.
            before_commit = (lambda step: reporter.require_flush()) if reporter else None
            on_event = reporter.event if reporter else lambda event: None
            self._memory_store = MemoryCheckpointer(
                job.memory_store, every, resumed=resumed, before_commit=before_commit, on_event=on_event, **common
            )

    def prepare(self) -> None:
        """Allocates memory for the copies, while the next step runs; after the first step, when the optimizer has its state."""
        state = self._state.capture()[:2]
        self._saver.prepare(*state)
        if self._memory_store:
            self._memory_store.prepare(*state)  # if a node lacks memory, no node takes snapshots

    def vote(self, due: bool) -> float:
        """This rank's vote on a snapshot after this step, see `MemoryCheckpointer.vote`; `due`: a checkpoint is saved there. No
        collective."""
        return self._memory_store.vote(self._progress.step, due) if self._memory_store else 0.0

    def due(self, step: int, ending: bool) -> bool:
        """Whether a checkpoint is saved after `step`, with which the run ends or not. No collective; all ranks have one answer."""
        return self._interval.due(step, ending)

    @property
    def requested(self) -> bool:
        """Whether this rank knows of a user's request for a checkpoint that is not answered. Not while another save is in flight,
        for which the step would be passed over: it is answered after that. No collective."""
        return self._reporter is not None and self._reporter.wants_checkpoint and not self._saver.busy

    def stepped(self, seconds: float, unusual: bool) -> None:
        """A step took so many seconds; `unusual`: it had other work than most steps. No collective."""
        self._interval.stepped(seconds, unusual)
        if self._memory_store:
            self._memory_store.stepped(seconds, unusual or self._saver.busy)

    def before_update(self) -> None:
        """Waits until no copy of the state is in progress. No collective."""
        self._saver.before_update()
        if self._memory_store:
            self._memory_store.before_update()

    def save(self, ending: bool) -> None:
        """Saves a checkpoint of this step: each rank writes its part, rank 0 commits last. `ending`: there is no later step to
        save.
        """
        self._saving = True
        step, loss = self._progress.step, self._progress.eval_loss
        if self._interval.every == "auto" and not ending:
            self._interval.next = gather_json(self._interval.after(step), self._rank.control)[0]
        if not self._saver.start(step, *self._capture(), last=ending):
            return
        if self._reporter:
            self._reporter.saves()
        if self._memory_store:
            self._memory_store.checkpoint(step)
        if loss is not None and self._progress.evaluated == step:
            self._saver.mark_eval(step, loss)

    def snapshot(self) -> None:
        """Takes a snapshot of this step in memory, if the votes require it."""
        assert self._memory_store is not None
        self._memory_store.start(self._progress.step, *self._capture())

    def committed(self) -> Iterator[int]:
        """The steps whose checkpoints were committed since the last call, on rank 0. No collective."""
        while self._committed:
            yield self._committed.popleft()

    def finish(self) -> None:
        """Returns once the last save is committed and copied. Raises SavesFailed after checkpoint.max_failures in a row."""
        while self._saving and not self._saver.wait():
            time.sleep(RETRY_S)  # the last save failed, and the run must not end without it
            self.save(ending=True)
        if self._replicas:
            self._replicas.close(self._spec.checkpoint.timeout_s)

    def close(self) -> None:
        """Ends saves in flight; after `finish` there are none. No collective."""
        if self._replicas:
            self._replicas.close(0.0)
        self._saver.close()
        if self._memory_store:
            self._memory_store.close()

    # --- inside

    def _capture(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """The content of a checkpoint of this step: tensors, this rank's own tensors, plain values."""
        step = self._progress.step
        tensors, rank_tensors, plain = self._state.capture()
        if self._parameters is not None and not self._parameters.is_same_everywhere:
            slots = gather_json(plain["optim"]["slots"], self._rank.control)  # rank 0 has not all names
            plain["optim"]["slots"] = {name: values for of_rank in slots for name, values in of_rank.items()}
        plain |= {
            **self._progress.to_plain(),
            "precision": self._precision.state(),
            "dataset": redact(self._job.dataset),
            "noise": self._noise.state() if self._noise else {},
            **self._bad_steps.state(step),
            **({} if self._base is None else {BASE: self._base}),
        }
        return tensors, rank_tensors, plain

    def _saved(self, event: Event) -> None:
        """An event of the Saver, on rank 0."""
        if self._reporter and self._replicas:
            self._reporter.event(event)
            if event.kind == "checkpoint_saved":
                self._committed.append(int(event.data["step"]))
                self._interval.saved(float(event.data["seconds"]), float(event.data["stall_seconds"]))
                self._replicas.committed()
