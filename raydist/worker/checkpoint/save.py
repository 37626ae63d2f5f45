"""Saves the training state beside training: stage, write, commit, prune. At most one save is in flight.

Runs in: each train worker. Torch, never ray.

    loop         start(step) ......... forward, backward ......... before_update() | optimizer.step() ...
    side thread       copy to the kept buffer ..................... ^ done; write and hash the shard, fsync
    rank 0's                                     every shard is durable -> before_commit() -> fence -> manifest -> prune

The loop stops only for what of the copy is not done by the time the weights are about to change. Until the manifest
is there, and it comes atomically and last, the checkpoint does not exist.

A save that fails costs nothing but itself. At each due step the ranks agree on how the one before ended:

    saved                          the next one starts
    failed                         the next one starts; `max_failures` in a row: SavesFailed
    on its way after PATIENCE_S    this step is passed over; a failure, once that save is older than `timeout_s`
    fenced                         Fenced, at the latest here: mostly `before_update` has said so
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from raydist import __version__
from raydist.checkpoint import manifest, retention
from raydist.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from raydist.errors import CheckpointError, Fenced, SavesFailed, StorageError
from raydist.records import Event
from raydist.run.directory import ATTEMPTS, RunDir, fenced, manifest_name
from raydist.worker.checkpoint import save_plan
from raydist.worker.checkpoint.dcp_storage import Commit, PartsPlanner, ShardWriter
from raydist.worker.checkpoint.save_plan import Part
from raydist.worker.checkpoint.staging import Stage

CLOSE_S = 60.0
PATIENCE_S = 5.0
"""The longest that the loop stands at a due step because the save before is still on its way."""
RETRY_S = 2.0
"""Before the last save of a run is tried again."""
_FOREVER = timedelta(days=30)
_SAVED, _FAILED, _WAITING, _WRITING, _FENCED = range(5)
"""A save as one rank has it, in the order of what counts among ranks. Waiting: for the others, which write."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended; true if it was committed. `cause`: what failed, and `failed_rank` where; else None.

    `bytes` of all shards (rank 0 knows; 0 elsewhere), `seconds` from start to commit, `stalled` of them the loop stood;
    `cpu_seconds` of this rank's side thread.
    """

    step: int
    committed: bool
    bytes: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    cpu_seconds: float = 0.0
    failed_rank: int | None = None
    cause: str | None = None

    def __bool__(self) -> bool:
        return self.committed


@dataclass(slots=True)
class _Save:
    """One save on its way."""

    step: int
    parts: list[Part]
    aliases: dict[str, str]
    plain: dict[str, Any]
    begun: float
    stalled: float = 0.0
    bytes: int = 0
    staged: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    writer: ShardWriter | None = None
    result: SaveResult | None = None

    def state(self) -> int:
        """_SAVED, _FAILED, _WAITING or _WRITING."""
        if self.done.is_set():
            return _SAVED if self.result else _FAILED
        return _WRITING if self.writer is None or self.writer.busy else _WAITING


class Saver:
    """Saves the state of all ranks; every rank makes one, and calls `start`, `wait` and `close` at the same steps.

    `group`: a gloo group of all ranks; None if there is one rank. The Saver makes itself another of the same ranks, for
    collectives of a side thread must not meet anybody else's. `asynchronous`: else `start` returns after the commit.
    `keep`: newest checkpoints that stay, besides the best. `attempt`, `spec_hash`, `numbers`: noted in the manifest.
    `max_failures`, `timeout_s`: see the module. `on_event` gets checkpoint_saved and checkpoint_failed on rank 0, from its side
    thread too. `before_commit` is called there just before the manifest is written; what it raises fails the save.
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
        before_commit: Callable[[], object] | None = None,
        max_failures: int = 3,
        timeout_s: float = 600.0,
    ) -> None:
        assert (group is None) == (world_size == 1), "a group of all ranks, or one rank"
        self._run, self._rank, self._world_size = run, rank, world_size
        self._control = group
        # A rank whose storage hangs keeps the others' side threads waiting for as long as it takes; a dead one ends them at once.
        self._group = (
            dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=_FOREVER) if group else None
        )
        self._asynchronous, self._keep = asynchronous, keep
        self._attempt, self._spec_hash = attempt, spec_hash
        self._numbers = _plain(dict(numbers), "numbers")
        self._on_event, self._before_commit = on_event, before_commit
        self._max_failures, self._timeout_s, self._failures = max_failures, timeout_s, 0
        self._noted = rank == 0 and attempt in run.lineage().begun
        self._fenced: Fenced | None = None
        self._stage: Stage | None = None
        self._save: _Save | None = None
        self._last: SaveResult | None = None
        self._unreported: SaveResult | None = None
        self._warm: threading.Thread | None = None
        self._evals: dict[int, float] = {}
        self._evals_lock = threading.Lock()

    def prepare(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> None:
        """Allocates the staging buffer for such a state, in the background. Without it the first save does.

        May be called once, after the first step, when the optimizer has its state. No collective.
        """
        parts = self._plan(tensors, rank_tensors)
        stage = self._stage_for(tensors)
        nbytes = save_plan.aligned(parts[-1].start + parts[-1].length) if parts else 0
        self._warm = threading.Thread(
            target=stage.reserve, args=(nbytes,), name="raydist-checkpoint-buffer", daemon=True
        )
        self._warm.start()

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        rank_tensors: Mapping[str, Tensor],
        plain: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> bool:
        """Saves the state after `step` updates; False if the step is passed over, for the save before is still on its way.

        A collective: all ranks do the same. `last`: no step may take its place, so the one before is waited for as in `wait`.

        `tensors`: replicated over the ranks, or DTensors; the same names on every rank. `rank_tensors`: this rank's own
        (random states). None of them may change before `before_update` has returned. `plain`: JSON values; rank 0's count.
        Raises CheckpointError for what cannot be saved at all, SavesFailed and Fenced as the module says. That one save failed
        is told by `poll`, `wait` and an event.
        """
        begun = time.perf_counter()
        if last:
            self.wait()
        if not self._settled(step):
            return False
        save = _Save(
            step,
            self._plan(tensors, rank_tensors),
            save_plan.aliases(tensors),
            _plain(dict(plain), "plain"),
            begun,
        )
        stage = self._stage_for(tensors)
        stage.ready()
        self._save = save
        threading.Thread(target=self._work, args=(save, stage), name="raydist-checkpoint", daemon=True).start()
        if not self._asynchronous:
            save.done.wait(self._timeout_s)
        save.stalled += time.perf_counter() - begun
        return True

    def _settled(self, step: int) -> bool:
        """Whether the save before `step` has ended on every rank. Every rank, with the same answer; failures are counted here."""
        save = self._save
        if save is None:
            return True
        save.done.wait(PATIENCE_S)
        state, rank, seconds = self._agree(save)
        if state == _FENCED:
            raise self._fenced or Fenced(f"attempt {self._attempt} may not commit", "this one was given up")
        if state in (_SAVED, _FAILED):
            self._save = None
            self._failures = self._failures + 1 if state == _FAILED else 0
            cause = save.result.cause if save.result is not None else None
            rank = rank if save.result is None or save.result.failed_rank is None else save.result.failed_rank
        else:
            self._failures += seconds > self._timeout_s
            cause = f"passed over: the save of step {save.step} is still on its way after {seconds:.0f} s"
            self._say("checkpoint_failed", step=step, rank=rank, cause=cause)
        if self._failures >= self._max_failures:
            self._save = None  # nobody waits for it any more
            raise SavesFailed(
                f"{self._failures} saves in a row failed up to step {step}; the last one: rank {rank}: {cause}",
                f"mend {self._run.uri}, then the same command goes on; checkpoint.max_failures is {self._max_failures}",
            )
        return self._save is None

    def _agree(self, save: _Save) -> tuple[int, int, float]:
        """The state of the save that counts, the first rank that has it, and the seconds since its start. Every rank."""
        state = _FENCED if self._fenced else save.state()
        told = torch.tensor(
            [
                state * self._world_size + self._world_size - 1 - self._rank,
                round(1000 * (time.perf_counter() - save.begun)),
            ]
        )
        if self._control is not None:
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._control)
        state, back = divmod(int(told[0]), self._world_size)
        return state, self._world_size - 1 - back, float(told[1]) / 1000

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._save is not None and not self._save.done.is_set()

    def before_update(self) -> None:
        """To be called before the weights change; returns once the state of the save in flight has been copied.

        Raises Fenced as soon as this rank knows that the attempt may not commit: there is nothing left to train for.
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
        with self._evals_lock:
            self._evals[step] = loss
            in_flight = self._save is not None and self._save.step == step and not self._save.done.is_set()
        if not in_flight:
            self._store_eval(step)

    def poll(self) -> SaveResult | None:
        """The result of a save that ended since the last call, once. Ranks may learn of it at different steps."""
        result, self._unreported = self._unreported, None
        return result

    def wait(self) -> SaveResult | None:
        """Waits for the save in flight. The last save's result, which all ranks agree on; None if there was none.

        Raises SavesFailed if it is still on its way `timeout_s` after its start, Fenced if that is why it failed.
        """
        save = self._save
        if save is not None:
            left = save.begun + self._timeout_s - time.perf_counter()
            if not save.done.wait(max(left, PATIENCE_S)):
                self._save = None
                who = "its own part is not written" if save.state() == _WRITING else "it waits for others"
                raise SavesFailed(
                    f"the save of step {save.step} is still on its way after {time.perf_counter() - save.begun:.0f} s: on rank "
                    f"{self._rank} {who}",
                    f"does {self._run.uri} answer? the same command goes on from the newest checkpoint; checkpoint.timeout_s is "
                    f"{self._timeout_s:g}",
                )
        if self._fenced is not None:
            raise self._fenced
        return self._last

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for the save in flight. One that hangs, for a peer of it hangs, is given up after `timeout_s`, with an event."""
        save, self._save = self._save, None
        if save is not None and not save.done.wait(timeout_s):
            cause = f"still not written {timeout_s:g} s after the end of training"
            self._say("checkpoint_failed", step=save.step, rank=self._rank, cause=cause)
        if self._warm is not None:
            self._warm.join(timeout_s)

    # --- the side thread

    def _work(self, save: _Save, stage: Stage) -> None:
        failure: BaseException | None = None
        before = time.thread_time()
        try:
            if self._warm is not None:
                self._warm.join()
            stage.copy(save.parts)
        except BaseException as error:  # told to all ranks below, where they meet
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
            result = SaveResult(save.step, True, save.bytes, seconds, save.stalled, cpu)
        except BaseException as error:  # DCP's CheckpointException is no Exception
            rank, first = _first(error, self._rank)
            self._fenced = first if isinstance(first, Fenced) else None
            cause = str(getattr(first, "message", None) or f"{type(first).__name__}: {first}")
            seconds = time.perf_counter() - save.begun
            result = SaveResult(save.step, False, 0, seconds, save.stalled, failed_rank=rank, cause=cause)
        save.parts = []
        save.result = self._last = self._unreported = result
        try:
            self._report(result)
            if self._rank == 0 and result.committed:
                self._tidy(result.step)
        finally:  # whatever on_event raises, nobody waits for ever
            with self._evals_lock:
                save.done.set()
        if self._rank == 0 and result.committed:
            self._store_eval(save.step)

    def _write(self, save: _Save, stage: Stage, failure: BaseException | None) -> None:
        def commit(files: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> None:
            if self._before_commit is not None:
                self._before_commit()
            with self._evals_lock:
                eval_loss = self._evals.pop(save.step, None)
            made = Manifest(
                step=save.step,
                world_size=self._world_size,
                attempt=self._attempt,
                saved_at=time.time(),
                spec_hash=self._spec_hash,
                files=files,
                tensors=tensors | {alias: tensors[name] for alias, name in save.aliases.items()},
                plain=save.plain,
                numbers=self._numbers,
                versions={"raydist": __version__, "torch": torch.__version__},
                eval_loss=eval_loss,
            )
            where = manifest.path(save.step, manifest_name(self._attempt))
            self._run.storage.write(where, made.dumps(), check=self._refuse_if_fenced)
            save.bytes = made.nbytes

        if self._group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank is no mistake
        save.writer = self._writer(save.step, save.parts, stage, commit)
        dcp_save(
            {},
            storage_writer=save.writer,
            planner=PartsPlanner(save.parts, failure),
            process_group=self._group,
            no_dist=self._group is None,
        )

    # --- what raydist.worker.checkpoint.memory_manager does otherwise

    def _plan(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> list[Part]:
        return save_plan.plan(tensors, rank_tensors, self._rank, self._world_size)

    def _writer(self, step: int, parts: list[Part], stage: Stage, commit: Commit) -> ShardWriter:
        # A name of its own for every save: what is committed is never written again, whatever is saved there once more.
        place = f"{self._rank:05d}-of-{self._world_size:05d}"
        name = f"shard-{place}-{self._attempt:04d}-{uuid.uuid4().hex[:8]}.bin"
        return ShardWriter(self._run, step, name, parts, stage.memory, commit)

    def _refuse_if_fenced(self) -> None:
        newest = self._run.lineage().newest
        if self._noted and newest == 0:
            # Not fenced, but gone: an unmounted folder takes files all the same, and they are lost with it.
            raise StorageError(f"{self._run.uri}/{ATTEMPTS}: the run's notes are gone", "is the storage mounted?")
        if newest not in (0, self._attempt):
            raise Fenced(
                f"attempt {self._attempt} may not commit: attempt {newest} has begun",
                "this one was given up, and its processes should end",
            )

    def _report(self, result: SaveResult) -> None:
        if result.committed:
            self._say(
                "checkpoint_saved",
                step=result.step,
                bytes=result.bytes,
                seconds=round(result.seconds, 3),
                stall_seconds=round(result.stalled, 4),
                best=self._is_best(result.step),
            )
        else:
            self._say("checkpoint_failed", step=result.step, rank=result.failed_rank, cause=result.cause)

    def _is_best(self, step: int) -> bool:
        try:
            return self._rank == 0 and manifest.best(self._run) == step
        except StorageError:
            return False  # it was committed; that storage has gone since is for the next save to say

    def _tidy(self, step: int) -> None:
        """What is no longer needed goes. That it did not costs disk space, and no checkpoint: an event says so."""
        try:
            if fenced(self._run, self._attempt):
                return  # what goes is now another attempt's to say
            retention.sweep(self._run, manifest.read(self._run, step))
            retention.prune(self._run, self._keep, orphans=True, attempt=self._attempt)
        except Exception as error:
            self._say("note", text=f"old checkpoints could not be deleted: {type(error).__name__}: {error}")

    def _store_eval(self, step: int) -> None:
        with self._evals_lock:
            loss = self._evals.pop(step, None)
        try:
            if loss is not None and self._run.manifest(step) is not None:
                manifest.write_eval(self._run, step, loss)
        except Exception as error:
            self._say("note", text=f"the eval loss of step {step} could not be stored: {type(error).__name__}: {error}")

    def _say(self, kind: str, **data: Any) -> None:
        if self._rank == 0:
            self._on_event(Event(kind, time.time(), data))

    def _stage_for(self, tensors: Mapping[str, Tensor]) -> Stage:
        if self._stage is None:
            local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
            devices = {t.device for t in local}
            on_gpu = [d for d in devices if d.type == "cuda"]
            self._stage = Stage(on_gpu[0] if on_gpu else torch.device("cpu"))
        return self._stage


def _plain(value: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        manifest.canonical(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what}: not plain data: {error}", "keep numbers, strings, lists and dicts in it"
        ) from error
    return value


def _first(error: BaseException, rank: int) -> tuple[int, BaseException]:
    """The first failure that a save met, and its rank."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return rank, error
