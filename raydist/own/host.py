"""What a session runs on: a rank of `raydist run`, or a process of torchrun, mpirun, srun or plain python.

Runs in: each rank. Torch, never ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from raydist.errors import StorageError, UsageError
from raydist.ipc.heartbeat import Heartbeat
from raydist.launch import script
from raydist.launch.script import ScriptRank
from raydist.launch.standalone import FolderLog
from raydist.own.launcher import store, translate
from raydist.run.directory import SPEC, RunDir, await_attempt, begin_attempt, check_name
from raydist.run.lease import DriverLease
from raydist.run.log import last_attempt
from raydist.spec import JobSpec, stored
from raydist.spec.script import joined
from raydist.storage import Storage
from raydist.worker import distributed
from raydist.worker.attempt import Job, Outcome
from raydist.worker.distributed import Rank
from raydist.worker.faults import injector_of
from raydist.worker.metrics.memory import MemoryMeter
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parallel import ParamShard


class _Host:
    """`reporter`: on rank 0, from `open` on."""

    reporter: Reporter | None = None

    def __init__(self) -> None:
        self._refused = set[int]()

    def asks(self, requested: bool) -> list[bool]:
        """What this rank asks of all after a step: the run's end, a checkpoint. `requested`: see `CheckpointManager`. Rank 0 knows
        of both, from users and the driver. A trace is refused."""
        if self.reporter is None:
            return [False, requested]
        for number, _ in self.reporter.traces:
            if number not in self._refused:
                self._refused.add(number)
                self.reporter.say("trace_failed", trace=number, rank=0, cause="a script's own loop has no trace")
        return [self.reporter.command == "stop", requested]


class Alone(_Host):
    """The session starts the process group, and rank 0 keeps the run's folder.

    `rank` is set by `open`. `heartbeat`: gets the phases of the steps.
    """

    rank: Rank

    def __init__(self) -> None:
        super().__init__()
        self.heartbeat = Heartbeat()
        self._lease: DriverLease | None = None
        self._log: FolderLog | None = None

    def open(self, spec: JobSpec, storage: str, fingerprint: str) -> Job:
        """Starts the group. Rank 0 also takes the run's lease and begins an attempt, whose number the others read."""
        translate(os.environ)
        run = RunDir(Storage(storage).at(check_name(spec.name)))
        if int(os.environ.get("RANK", 0)) == 0:  # before the group starts: the others wait there, then find the attempt
            self._lease = DriverLease(run)
            attempt = last_attempt(run) + 1
            run.storage.write(SPEC, stored(spec).encode())
            begin_attempt(run, attempt)
        timeout_s = spec.recovery.timeout_s
        self.rank = distributed.start(gpus=None, threads=None, timeout_s=timeout_s, met=store(os.environ, timeout_s))
        if self._lease is None:
            attempt = run.lineage().newest or 1
            await_attempt(run, attempt)
        else:
            self._log = FolderLog(run, self._lease, attempt, self.rank.world_size, quiet=True)
            self.reporter = Reporter(self._log.push, self._log.durable)
        return Job(spec, run, fingerprint, attempt)

    def built(self, model: nn.Module, shards: Mapping[str, ParamShard], optimizer: torch.optim.Optimizer) -> None:
        """The model is on its device, and nothing is loaded yet."""

    def loaded(self) -> None:
        """The newest checkpoint, if there is one, is loaded."""

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """A context around each backward pass."""
        return contextlib.nullcontext()

    def before_update(self) -> None:
        """The gradients of a step are summed."""

    def first_step(self, step: int) -> bool:
        """`step` is done. Whether it is the first one of an attempt that copies its state to memory."""
        return False

    def copies(self, vote: float) -> bool:
        """Whether the state is to be copied to memory after this step; every rank. `vote`: see `MemoryCheckpointer.vote`."""
        return False

    def close(self, outcome: Outcome) -> None:
        """Writes the run's end, and gives the lease back."""
        if self.reporter:
            self.reporter.close()
        if self._log:
            with contextlib.suppress(StorageError):
                self._log.end(outcome.status, outcome.step)
        if self._lease:
            self._lease.release()

    def leave(self) -> None:
        """Ends the group."""
        distributed.stop(self.rank)


class Launched(_Host):
    """The group, the run's folder and its records are those of the rank that `raydist run` has started."""

    def __init__(self, here: ScriptRank) -> None:
        super().__init__()
        self._here, self.rank, self.reporter = here, here.rank, here.reporter
        self._injector = injector_of(here.job, here.rank)
        self.heartbeat = self._injector.watch(here.heartbeat) if self._injector else here.heartbeat
        self._meter: MemoryMeter | None = None
        self._trained = False

    def open(self, spec: JobSpec, storage: str, fingerprint: str) -> Job:
        """The attempt of the rank, with the session's arguments. `storage` and the session's name are not used."""
        here = self._here
        if here.outcome is not None:
            raise UsageError("a script of `raydist run` has one session", "start a command for each")
        job = dataclasses.replace(here.job, spec=joined(spec, here.job.spec), dataset=fingerprint)
        if here.rank.first:
            job.run.storage.write(SPEC, stored(job.spec).encode())
        return job

    def built(self, model: nn.Module, shards: Mapping[str, ParamShard], optimizer: torch.optim.Optimizer) -> None:
        """Measures the memory from now on."""
        self._meter = MemoryMeter(self.rank.device, model, shards, optimizer)
        self._here.telemetry.sources.append(self._meter.read)
        if self._injector:
            self._injector.attach(model)
            self._injector.attach_optimizer(optimizer)
            self._here.telemetry.sources.append(self._injector.readings.read)
        self._here.startup.done("build")

    def loaded(self) -> None:
        """From now on errors are those of the first step."""
        self._here.startup.done("load")

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """Counts the waits for what a backward pass sends as exposed communication."""
        return self._here.telemetry.around_backward(0)

    def before_update(self) -> None:
        """Measures the state once."""
        if self._meter is not None:
            self._meter.before_update()

    def first_step(self, step: int) -> bool:
        """Reports the time until then, once."""
        if self._trained:
            return False
        self._trained = True
        here = self._here
        here.startup.done("first_step")
        if here.reporter:
            data = here.startup.first_step_data(step - 1)
            here.reporter.say("first_step", attempt=here.job.attempt, step=step, **data)
        return True

    def copies(self, vote: float) -> bool:
        """A copy is taken if rank 0 wants one and no rank is busy with the last."""
        votes = torch.tensor(vote, dtype=torch.float64)
        if self.rank.world_size > 1:
            dist.all_reduce(votes, group=self.rank.control)
        return votes.item() == 1.0

    def close(self, outcome: Outcome) -> None:
        """Leaves the outcome for the rank."""
        self._here.outcome = outcome

    def leave(self) -> None:
        """The rank leaves the group after the script."""


def host() -> Alone | Launched:
    """What the session of this process runs on."""
    return Launched(script.current) if script.current is not None else Alone()
