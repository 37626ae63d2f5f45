"""The training loop, from the process group to the last checkpoint. Comments name the ranks that take part in each line.

Runs in: each train worker. Torch, never ray: the loop reaches the monitor through the plain callables of `MonitorChannel`.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable

import torch

from raydist.data.batches import StepBatch
from raydist.data.loader import Loader, Stall
from raydist.errors import HookFailed
from raydist.ipc.heartbeat import Heartbeat
from raydist.records import Event, StepRecord
from raydist.redact import redact
from raydist.worker import distributed, numerics
from raydist.worker.assembly import Assembly, due
from raydist.worker.attempt import Job, MonitorChannel, Outcome
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.evaluation import evaluate
from raydist.worker.metrics import memory
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.metrics.startup_timing import Startup
from raydist.worker.metrics.telemetry import Telemetry
from raydist.worker.optim.schedule import lr_at
from raydist.worker.step import LEFT_OUT, StepReport

Body = Callable[[Job, Rank, Reporter | None, Heartbeat, Startup, Telemetry], Outcome]


def _to_stderr(event: Event) -> None:
    print(f"raydist: {event.kind}: {redact(event.data)}", file=sys.stderr, flush=True)


def train(
    job: Job,
    rank: Rank,
    channel: MonitorChannel | None,
    heartbeat: Heartbeat | None = None,
    startup: Startup | None = None,
    tell: Callable[[Event], None] = _to_stderr,
    body: Body | None = None,
) -> Outcome:
    """Trains from the newest good checkpoint, or from the start, to the end. Called by every rank; only rank 0 has a `channel`.

    `heartbeat` gets the phase of this rank, `startup` its progress before the first step. `tell`: sends the events of a rank
    without a channel; it must not block. `body`: trains in place of the loop, such as a user's script.

    Raises the error that stops the run: NonFinite, LossSpike, GraphMismatch, SavesFailed, Fenced, SuspectHardware, CheckpointError,
    DataError, or the model's own exception; and Rollback, which ends the attempt.
    """
    reporter = Reporter(channel.push, channel.durable) if channel is not None else None
    try:
        workers = gather_json(distributed.describe(rank), rank.control)
        if reporter:
            reporter.say("workers", workers=workers)
            reporter.say("note", text="; ".join(rank.notes))
            for line in numerics.differences(workers) if job.spec.train.virtual_ranks is not None else ():
                reporter.say("note", text=line)
        tell = reporter.event if reporter else tell
        heartbeat = heartbeat or Heartbeat()
        memory.keep_history(job.run, rank, job.attempt, job.spec.observe.memory_history)
        with Telemetry(job.run.uri, rank, job.attempt, heartbeat, job.spec.observe.interval_s, tell) as telemetry:
            startup = startup or Startup()
            if body is not None:
                return body(job, rank, reporter, heartbeat, startup, telemetry)
            return _Run(job, rank, reporter, heartbeat, startup, tell, telemetry).train()
    except torch.OutOfMemoryError:
        tell(Event("note", time.time(), {"text": memory.after_oom(rank.rank, job.spec.observe.memory_history)}))
        raise
    finally:
        if reporter:
            reporter.close()


class _Run(Assembly):
    """One attempt."""

    def train(self) -> Outcome:
        """The loop, with the hooks' calls around it."""
        self.hooks.call("on_start")
        try:
            return self._train()
        except Exception as error:
            try:
                self.hooks.call("on_failure", error)
            except HookFailed as second:  # the first error stays the cause
                error.add_note(str(second))
            raise

    def _train(self) -> Outcome:
        """The loop. A line with `every rank` in its comment is a collective."""
        at = self.at
        first, stop = at.step + 1, False
        loader = Loader(
            self.feed.samples,
            self.batches,
            at.cursor,
            rank=self.mesh.data_rank,
            world=self.mesh.data_size,
            divide=self.feed.divide,
            pack=self.spec.data.pack,
            prefetch=self.spec.data.prefetch,
            steps=max(self.last - at.step, 0),
            transform=self.injector.data(self.batches, self.feed.to_torch) if self.injector else self.feed.to_torch,
            timeout_s=self.spec.recovery.data_patience,
            on_stall=self._stalled,
        )
        self.telemetry.sources.append(loader.spent)
        try:
            with loader:
                begun = before = time.perf_counter()
                unusual = True  # this step takes longer than others: caches warm up
                self.heartbeat.step(at.step + 1)
                for batch in loader:  # every rank, its own slice of the same global batch
                    at.step += 1
                    ending = at.step == self.last
                    lr = lr_at(at.step, self.total, self.spec.optim.schedule, self.peak_lr)
                    if self.bad_steps.leaves_out(at.step, batch):
                        report = LEFT_OUT
                    else:
                        report = self.train_step(  # every rank: gradients and loss are summed
                            at.step,
                            [self.feed.to_device(m) for m in batch.micro_batches],
                            batch.tokens,
                            lr,
                            want_stop=bool(self.reporter and self.reporter.command == "stop"),
                            vote=self.checkpoints.vote(self.checkpoints.due(at.step, ending)),
                            trace=self.tracer.requested(self.reporter.traces) if self.reporter else (0, 0),
                            samples=len(batch.ids),
                            want_save=self.checkpoints.requested,
                        )
                    if self.outer and self.outer.stepped(at.step, self.checkpoints.before_update):  # every rank
                        self.strategy.updated()
                    at.cursor, stop = batch.after, report.stop
                    at.loss = report.loss if math.isfinite(report.loss) else at.loss
                    ended = time.perf_counter()
                    self.heartbeat.stepped(ended - begun - batch.wait_seconds)
                    self._record(batch, lr, report, ended - begun)
                    self.checkpoints.stepped(ended - before, unusual)
                    before, unusual = ended, False
                    if at.step == first:
                        self.startup.done("first_step")
                        if self.reporter:
                            data = self.startup.first_step_data(first - 1, self.batches.steps_per_epoch)
                            self.reporter.say("first_step", attempt=self.job.attempt, step=first, **data)
                        self.checkpoints.prepare()  # every rank: memory for copies
                        unusual = True
                        # The objects of torch and the model stay: without `freeze` a full collection scans them for 0.2 s.
                        gc.collect()
                        gc.freeze()
                    if self.eval_set and due(at.step, self.spec.eval.every, at.step == self.total):
                        self._evaluate()  # every rank: losses are summed
                        unusual = True
                    if self.checkpoints.due(at.step, stop or ending) or report.save:
                        self._before_copy()
                        self.checkpoints.save(stop or ending)  # every rank writes its part; rank 0 commits, last
                        unusual = True
                    elif report.votes == 1.0:
                        self._before_copy()
                        self.checkpoints.snapshot()  # every rank: to memory
                    self.tracer.step(at.step + 1, report.trace, ends=stop or ending)  # every rank, the same steps
                    begun = time.perf_counter()
                    self.heartbeat.step(at.step + 1)
                    if stop:
                        break
            self.heartbeat.enter("end")
            if self.outer:
                self.outer.close()
            if self.gradients:
                self.gradients.close()
            self.checkpoints.finish()  # every rank
        finally:
            self.tracer.close()
            self.checkpoints.close()
            self.train_step.optimizer_hooks.close()
        status = "finished" if at.step >= self.total else "interrupted" if stop else "paused"
        outcome = Outcome(status, at.step, at.loss, at.eval_loss)
        self._tell_committed()
        self.hooks.call("on_end", outcome)
        return outcome

    def _before_copy(self) -> None:
        self.heartbeat.enter("save")
        if self.replica_check and self.replica_check.before_save(self.at.step):  # every rank: hashes are compared
            self.strategy.updated()

    def _stalled(self, stall: Stall) -> None:
        """Reports that the loader gives no batch, while the stall lasts: on rank 0 as an event, on others through `tell`."""
        data = {
            "step": self.at.step + 1,
            "rank": self.rank.rank,
            "seconds": round(stall.seconds, 3),
            "files": self.feed.samples.files(stall.ids),
            "where": stall.at,
            "restarts": stall.restarts,
            "final": stall.final,
        }
        self._tell(Event("data_stalled", time.time(), data))

    def _record(self, batch: StepBatch, lr: float, report: StepReport, seconds: float) -> None:
        if not (self.reporter or self.hooks):
            return
        experts = self.experts if report is not LEFT_OUT else None
        loads, bias = experts.recorded if experts else (None, None)
        sent = self.compression.last if self.compression else None
        sync = self.outer.last if self.outer else None
        record = StepRecord(  # the values are the same on every rank, but for those of compression and outer steps
            step=self.at.step,
            loss=report.loss,
            lr=lr,
            grad_norm=report.grad_norm,
            tokens=report.tokens,
            seconds=seconds,
            data_seconds=batch.wait_seconds,
            world_size=self.rank.world_size,
            attempt=self.job.attempt,
            samples_hash=batch.samples_hash,
            grad_noise_scale=self.noise.scale if self.noise else None,
            expert_imbalance=experts.imbalance if experts else None,
            exchanged_bytes=experts.exchanged if experts else None,
            residual_norm=sent.residual_norm if sent else None,
            compression_error=sent.compression_error if sent else None,
            sent_bytes=sent.sent_bytes if sent else None,
            saved_bytes=sent.saved_bytes if sent else None,
            local_step=self.outer.local if self.outer else None,
            sync_seconds=sync[0] if sync else None,
            sync_bytes=sync[1] if sync else None,
            samples=0 if report is LEFT_OUT else len(batch.ids),
            expert_loads=loads,
            expert_bias=bias,
        )
        if self.reporter:
            self.reporter.step(record)
        self.hooks.call("on_step", record)
        self._tell_committed()

    def _tell_committed(self) -> None:
        for step in self.checkpoints.committed():
            self.hooks.call("on_checkpoint", step)

    def _evaluate(self) -> None:
        self.at.eval_loss, tokens = evaluate(
            self.mesh, self.strategy, self.precision, self.eval_set, self.heartbeat, self.loss
        )
        self.at.evaluated = self.at.step
        best = self.at.best_eval is None or self.at.eval_loss < self.at.best_eval
        self.at.best_eval = self.at.eval_loss if best else self.at.best_eval
        if self.reporter:
            self.reporter.say("eval", step=self.at.step, loss=self.at.eval_loss, tokens=tokens, best=best)
        self.hooks.call("on_eval", self.at.step, self.at.eval_loss)
