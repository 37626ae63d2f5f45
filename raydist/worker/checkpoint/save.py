"""Saves the training state while training continues: stage, write, commit, prune. At most one save is in flight.

Runs in: each train worker. Torch, never ray.

    loop         start(step) ......... forward, backward ......... before_update() | optimizer.step() ...
    side thread       copy to the kept buffer ..................... ^ done; write and hash the shard, fsync
    rank 0's                                     every shard is durable -> before_commit() -> fence -> manifest -> prune

The loop waits only for the rest of the copy, just before the weights change. The manifest is written atomically and last; before
that the checkpoint does not exist. Rank 0's commit is in commit.py.

A failed save does not stop training. At each due step the ranks agree on how the previous save ended:

    saved                          the next one starts
    failed                         the next one starts; `max_failures` in a row: SavesFailed
    in flight after PATIENCE_S     this step is passed over; a failure, once that save is older than `timeout_s`
    fenced                         Fenced, at the latest here: mostly `before_update` has raised it
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import FileEntry, TensorEntry
from raydist.errors import CheckpointError, Fenced, SavesFailed
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.worker.checkpoint import save_plan
from raydist.worker.checkpoint.agreement import RankFailure
from raydist.worker.checkpoint.commit import Committer, Facts
from raydist.worker.checkpoint.save_in_flight import (
    DELETING,
    FAILED,
    FENCED,
    SAVED,
    WRITING,
    Save,
    SaveResult,
)
from raydist.worker.checkpoint.save_plan import Part
from raydist.worker.checkpoint.shard_writer import Commit, ShardWriter
from raydist.worker.checkpoint.staging import Stage, device_of
from raydist.worker.parameter_table import ParameterTable, TableCache, TensorTable

CLOSE_S = 60.0
PATIENCE_S = 5.0
"""The longest time that the loop waits at a due step because the previous save is still in flight."""
RETRY_S = 2.0
"""Before the last save of a run is retried."""
_FOREVER = timedelta(days=30)


class Saver:
    """Saves the state of all ranks. Every rank makes one, and calls `prepare`, `start`, `wait` and `close` at the same steps.

    `group`: a gloo group of all ranks; None if there is one rank. The Saver makes another group of the same ranks: collectives of
    its side thread must not mix with others. `asynchronous`: else `start` returns after the commit. `keep`: newest checkpoints that
    stay, besides the best. `attempt`, `spec_hash`, `numbers`, `mesh` go into the manifest. `parameters`: a commit without all of
    them fails. `max_failures`, `timeout_s`: see the module. `on_event` gets checkpoint_saved and checkpoint_failed on rank 0, also
    from its side thread. `before_commit` is called there with the step, just before the manifest is written, and gives more plain
    values for it; if it raises, the save fails.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        asynchronous: bool,
        keep: int,
        attempt: int,
        spec_hash: str,
        numbers: Mapping[str, Any],
        on_event: Callable[[Event], None],
        mesh: Mapping[str, int] | None = None,
        parameters: ParameterTable | None = None,
        before_commit: Callable[[int], Mapping[str, Any] | None] | None = None,
        max_failures: int = 3,
        timeout_s: float = 600.0,
    ) -> None:
        assert (group is None) == (world_size == 1), "a group of all ranks, or one rank"
        self._run, self._rank, self._world_size = run, rank, world_size
        self._control = group
        # While storage hangs on one rank, the side threads of the others wait without a limit; if that rank dies, they end at once.
        self._group = (
            dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=_FOREVER) if group else None
        )
        self._asynchronous, self._attempt = asynchronous, attempt
        self._on_event, self._before_commit = on_event, before_commit
        self._max_failures, self._timeout_s, self._failures = max_failures, timeout_s, 0
        noted = rank == 0 and attempt in run.lineage().begun
        facts = Facts(world_size, mesh or {}, attempt, spec_hash, _plain(dict(numbers), "numbers"))
        self.committer = Committer(run, facts, keep=keep, noted=noted, say=self._say)
        # Those of the base are named in the manifest (BASE), and read from another place.
        wanted = parameters.items() if parameters else ()
        base = set(parameters.base) if parameters else ()
        self._parameters = {f"model/{name}": row.shape for name, row in wanted if name not in base}
        self._tables = TableCache(rank, group)
        self._fenced: Fenced | None = None
        self._stage: Stage | None = None
        self._save: Save | None = None
        self._last: SaveResult | None = None
        self._unreported: SaveResult | None = None
        self._warm: threading.Thread | None = None

    def prepare(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> None:
        """Allocates the buffers for such a state, in the background. Without it the first save does.

        May be called once, after the first step, when the optimizer has its state. A collective.
        """
        nbytes = self.nbytes(tensors, rank_tensors)
        stages = self._stages_for(tensors)

        def reserve() -> None:
            # A failure is reported by the first save, where all ranks learn of it.
            with contextlib.suppress(OSError, MemoryError, RuntimeError):
                for stage in stages:
                    stage.reserve(nbytes)

        self._warm = threading.Thread(target=reserve, name="raydist-checkpoint-buffer", daemon=True)
        self._warm.start()

    def nbytes(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> int:
        """Of this rank's shard. A collective."""
        parts = self._plan(tensors, rank_tensors, self._tables.of(tensors, save_plan.aliases(tensors)))
        return save_plan.aligned(parts[-1].start + parts[-1].length) if parts else 0

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        rank_tensors: Mapping[str, Tensor],
        plain: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> bool:
        """Saves the state after `step` updates; False if the step is passed over, because the previous save is still in flight.

        A collective: all ranks do the same. `last`: there is no next step to save, so this waits for the previous save like `wait`.

        `tensors`: plain ones are equal on all ranks that have the name; the others are DTensors. Ranks may have different names:
        the checkpoint has the union. `rank_tensors`: of this rank alone. None of them may change before
        `before_update` has returned. `plain`: JSON values; those of rank 0 are saved.
        Raises CheckpointError for values that cannot be saved at all, SavesFailed and Fenced as in the module's docstring. The
        failure of one save is reported by `poll`, `wait` and an event.
        """
        begun = time.perf_counter()
        if last:
            self.wait()
        if not self._settled(step):
            return False
        table = self._tables.of(tensors, save_plan.aliases(tensors))
        parts = self._plan(tensors, rank_tensors, table)
        save = Save(step, parts, table, self._plain_of(table, _plain(dict(plain), "plain")), begun)
        stage = self._stage_for(tensors)
        stage.ready()
        self._save = save
        try:
            threading.Thread(target=self._work, args=(save, stage), name="raydist-checkpoint", daemon=True).start()
        except RuntimeError:  # no thread can be started now; the other ranks' threads wait for this rank
            self._work(save, stage)
        if not self._asynchronous:
            save.done.wait(self._timeout_s)
        save.stalled += time.perf_counter() - begun
        return True

    def _settled(self, step: int) -> bool:
        """Whether the previous save has ended on every rank. The same answer on every rank; failures are counted here."""
        save = self._save
        if save is None:
            return True
        save.done.wait(PATIENCE_S)
        state, rank, seconds = self._agree(save)
        if state == FENCED:
            raise self._fenced or Fenced(f"attempt {self._attempt} may not commit", "a newer one has replaced it")
        if state in (SAVED, FAILED):
            self._save = None
            self._failures = self._failures + 1 if state == FAILED else 0
            cause = save.result.cause if save.result is not None else None
            rank = rank if save.result is None or save.result.failed_rank is None else save.result.failed_rank
        else:
            self._failures += state != DELETING and seconds > self._timeout_s
            what = "is done, but old ones are still being deleted" if state == DELETING else "is still on its way"
            cause = f"passed over: the save of step {save.step} {what} after {seconds:.0f} s"
            self._say("checkpoint_failed", step=step, rank=rank, cause=cause, skipped=True)
        if self._failures >= self._max_failures:
            self._save = None  # it is not waited for again
            raise SavesFailed(
                f"{self._failures} saves in a row failed up to step {step}; the last one: rank {rank}: {cause}",
                f"repair {self._run.uri}, then rerun the same command to resume; checkpoint.max_failures is {self._max_failures}",
            )
        return self._save is None

    def _agree(self, save: Save) -> tuple[int, int, float]:
        """(the largest state of the save over the ranks, the first rank in that state, seconds since its start). A collective."""
        state = FENCED if self._fenced else save.state()
        sent = torch.tensor(
            [
                state * self._world_size + self._world_size - 1 - self._rank,
                round(1000 * (time.perf_counter() - save.begun)),
            ]
        )
        if self._control is not None:
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._control)
        state, back = divmod(int(sent[0]), self._world_size)
        return state, self._world_size - 1 - back, float(sent[1]) / 1000

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._save is not None and not self._save.done.is_set()

    def before_update(self) -> None:
        """To be called before the weights change; returns once the state of the save in flight has been copied.

        Raises Fenced as soon as this rank knows that the attempt may not commit: more training would be lost.
        """
        if self._fenced is not None:
            raise self._fenced
        save = self._save
        if save is None or save.done.is_set():
            return
        begun = time.perf_counter()
        save.staged.wait()
        if self._stage is not None:
            self._stage.hold_update()
        save.stalled += time.perf_counter() - begun

    def mark_eval(self, step: int, loss: float) -> None:
        """The eval loss of the state after `step` updates: of the save in flight, or of a committed checkpoint."""
        if self._rank != 0:
            return
        with self.committer.evals_lock:
            self.committer.keep_eval(step, loss)
            in_flight = self._save is not None and self._save.step == step and not self._save.done.is_set()
        if not in_flight:
            self.committer.store_eval(step)

    def poll(self) -> SaveResult | None:
        """The result of a save that ended since the last call, once. Ranks may get it at different steps."""
        result, self._unreported = self._unreported, None
        return result

    def wait(self) -> SaveResult | None:
        """Waits for the save in flight. The last save's result, which all ranks agree on; None if there was none.

        Raises SavesFailed if it is still in flight `timeout_s` after its start, Fenced if it failed for that reason.
        """
        save = self._save
        if save is not None:
            left = save.begun + self._timeout_s - time.perf_counter()
            if not save.done.wait(max(left, PATIENCE_S)) and not save.result:
                self._save = None
                who = "its own part is not written" if save.state() == WRITING else "it is waiting for other ranks"
                raise SavesFailed(
                    f"the save of step {save.step} is still on its way after {time.perf_counter() - save.begun:.0f} s: on rank "
                    f"{self._rank} {who}",
                    f"check that {self._run.uri} responds; the same command resumes from the newest checkpoint; "
                    f"checkpoint.timeout_s is {self._timeout_s:g}",
                )
        if self._fenced is not None:
            raise self._fenced
        return self._last

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for the save in flight. If it hangs, because a peer hangs, it is abandoned after `timeout_s`, with an event."""
        save, self._save = self._save, None
        if save is not None and not save.done.wait(timeout_s) and not save.result:
            cause = f"still not written {timeout_s:g} s after the end of training"
            self._say("checkpoint_failed", step=save.step, rank=self._rank, cause=cause)
        if self._warm is not None:
            self._warm.join(timeout_s)

    # --- the side thread

    def _work(self, save: Save, stage: Stage) -> None:
        failure: BaseException | None = None
        before = time.thread_time()
        try:
            if self._warm is not None:
                self._warm.join()
            stage.copy(save.parts)
            stage.tell(self._say)
        except BaseException as error:  # all ranks learn of it, below
            failure = error
        save.staged.set()
        try:
            if failure is None:
                stage.finish()
        except BaseException as error:
            failure = error
        try:
            self._write(save, stage, failure)
            cpu, seconds = time.thread_time() - before, time.perf_counter() - save.begun
            result = SaveResult(save.step, True, save.bytes, seconds, self._stalled(save, seconds), cpu)
        except BaseException as error:
            rank, first = (error.rank, error.error) if isinstance(error, RankFailure) else (self._rank, error)
            self._fenced = first if isinstance(first, Fenced) else None
            cause = str(getattr(first, "message", None) or f"{type(first).__name__}: {first}")
            seconds = time.perf_counter() - save.begun
            result = SaveResult(
                save.step, False, 0, seconds, self._stalled(save, seconds), failed_rank=rank, cause=cause
            )
        save.parts = []
        save.result = self._last = self._unreported = result
        try:
            self._report(result)
            if self._rank == 0 and result.committed:
                self._delete_old(result.step)
        finally:  # also if on_event raises: `wait` must return
            with self.committer.evals_lock:
                save.done.set()
        if self._rank == 0 and result.committed:
            self.committer.store_eval(save.step)

    def _stalled(self, save: Save, seconds: float) -> float:
        """Of the seconds so far those in which the loop has waited: all, if `start` returns after the commit."""
        return save.stalled if self._asynchronous else seconds

    def _write(self, save: Save, stage: Stage, failure: BaseException | None) -> None:
        table = save.table
        wanted = {name: row.shape for name, row in table.items()} | self._parameters
        in_shards = {name: shape for name, shape in wanted.items() if name not in table or table[name].alias is None}

        def commit(files: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> None:
            more = (self._before_commit(save.step) if self._before_commit is not None else None) or {}
            tensors = tensors | {n: tensors[row.alias] for n, row in table.items() if row.alias in tensors}
            save.bytes = self.committer.commit(save.step, files, tensors, {**save.plain, **more}, wanted)

        save.writer = self._writer(save.step, save.parts, stage, commit)
        save.writer.save(failure, in_shards)

    # --- replaced by MemorySaver

    def _plan(
        self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor], table: TensorTable
    ) -> list[Part]:
        return save_plan.plan(tensors, rank_tensors, table)

    def _plain_of(self, table: TensorTable, plain: dict[str, Any]) -> dict[str, Any]:
        return plain

    def _writer(self, step: int, parts: list[Part], stage: Stage, commit: Commit) -> ShardWriter:
        # Every save has new names: a committed file is never written again, also if the same step is saved once more.
        place = f"{self._rank:05d}-of-{self._world_size:05d}"
        name = f"shard-{place}-{self._attempt:04d}-{uuid.uuid4().hex[:8]}.bin"
        return ShardWriter(self._run, step, name, parts, stage.memory, commit, self._group)

    def _report(self, result: SaveResult) -> None:
        if result.committed:
            self._say(
                "checkpoint_saved",
                step=result.step,
                bytes=result.bytes,
                seconds=round(result.seconds, 3),
                stall_seconds=round(result.stalled, 4),
                best=self._rank == 0 and self.committer.is_best(result.step),
            )
        else:
            self._say("checkpoint_failed", step=result.step, rank=result.failed_rank, cause=result.cause)

    def _delete_old(self, step: int) -> None:
        self.committer.delete_old(step)

    def _say(self, kind: str, **data: Any) -> None:
        if self._rank == 0:
            self._on_event(Event(kind, time.time(), data))

    def _stages_for(self, tensors: Mapping[str, Tensor]) -> Sequence[Stage]:
        """All buffers that saves will use."""
        return [self._stage_for(tensors)]

    def _stage_for(self, tensors: Mapping[str, Tensor]) -> Stage:
        if self._stage is None:
            self._stage = Stage(device_of(tensors))
        return self._stage


def _plain(value: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        manifest.canonical(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}: not plain data: {error}", "keep numbers, strings, lists and dicts in it"
        ) from error
    return value
