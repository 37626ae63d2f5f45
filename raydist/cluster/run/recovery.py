"""Decides what follows a failed attempt: a restart or the end, and with how many workers. RestartLoop and Elasticity act on it.

Runs anywhere. Pure: no ray, no torch, no clock, no I/O; tested as a table.

    errors of all ranks --root_cause--> Failure --decide(history, policy, split)--> Restart | Stop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from raydist.cluster.run.root_cause import Failure, Kind


class Policy(Protocol):
    """The fields of `recovery:` in a job that `decide` and `resize` read. `max_failures` -1: no limit."""

    @property
    def max_failures(self) -> int:
        """Failures in a row without progress after which the run still restarts."""

    @property
    def backoff_s(self) -> float:
        """Seconds to wait after the second of them; each further one doubles it."""

    @property
    def backoff_cap_s(self) -> float:
        """The longest wait, in seconds."""

    @property
    def max_rollbacks(self) -> int:
        """The most rollbacks in the whole run."""

    @property
    def wait_for_nodes(self) -> float:
        """Seconds to wait for the smallest allowed number of workers."""

    @property
    def wait_for_spare_s(self) -> float:
        """Seconds to wait for all workers before the run continues with fewer."""

    @property
    def on_oom(self) -> Literal["stop", "shrink_micro_batch"]:
        """What to do when a rank runs out of memory."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the failed attempt split its global batch: over `replicas` of the model, in passes of at most `micro_batch` sequences."""

    global_batch: int
    micro_batch: int
    replicas: int

    @property
    def largest_pass(self) -> int:
        """Sequences of the largest forward pass: a replica's share may be smaller than a micro-batch (`data.batches.share`)."""
        share = -(-self.global_batch // self.replicas)
        return -(-share // -(-share // self.micro_batch))

    def smaller(self) -> int | None:
        """The micro-batch for the next attempt: at most half of the largest pass, and a divisor of the global batch; None at 1."""
        half = self.largest_pass // 2
        return next((n for n in range(half, 0, -1) if self.global_batch % n == 0), None)


@dataclass(frozen=True, slots=True)
class Budget:
    """The same with data.batching: passes of at most `max_tokens` tokens, of which the longest sequence needs `longest`."""

    max_tokens: int
    longest: int

    def smaller(self) -> int | None:
        """The tokens for the next attempt: half, or as many as the longest sequence needs; None if there are no more now."""
        half = max(self.max_tokens // 2, self.longest)
        return half if half < self.max_tokens else None


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """The same with train.virtual_ranks, where the shapes of passes decide bits. `recomputed`: all blocks are computed again in
    backward, so that a pass needs no less memory in any way that keeps its shape."""

    recomputed: bool


Passes = Split | Budget | FixedShapes


CRASH_LOOP = 3
"""After the same cause this many times, with no step committed in between, another attempt would fail too."""
SUSPECT = 2
"""After this many deaths or hangs in a row of ranks on one node, with no step committed in between, the node may be the cause. Less
than CRASH_LOOP, so that the run tries other nodes before it ends."""
_OF_A_NODE: tuple[Kind, ...] = ("worker_died", "worker_hung")


@dataclass(frozen=True, slots=True)
class Past:
    """An earlier failure, and the newest committed step at that time."""

    signature: tuple[str, str]
    committed: int
    node: str | None = None
    cause: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """The earlier failures of this run, and the newest step that is committed now."""

    past: tuple[Past, ...] = ()
    committed: int = 0

    def at(self, committed: int) -> History:
        """This history with `committed` as the newest committed step."""
        return replace(self, committed=committed)

    def then(self, failure: Failure) -> History:
        """This history with `failure` added, for the next `decide`."""
        return replace(
            self, past=(*self.past, Past(failure.signature, self.committed, failure.node, failure.cause, failure.rank))
        )

    def stuck(self) -> tuple[Past, ...]:
        """The failures since the last progress: those at the present newest committed step."""
        n = 0
        for past in reversed(self.past):
            if past.committed < self.committed:
                break
            n += 1
        return self.past[len(self.past) - n :]


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a new attempt after `after_s` seconds, with another `micro_batch` or `max_tokens` and without the node `exclude`, if
    given. `recompute`: with train.checkpoint_activations: full."""

    after_s: float
    because: str
    micro_batch: int | None = None
    exclude: str | None = None
    max_tokens: int | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run with `cause`. `rank`: whose it is, if it is not that of the last failure."""

    cause: str
    because: str
    rank: int | None = None


def decide(
    failure: Failure, history: History, policy: Policy, split: Passes | None = None, *, elsewhere: bool = False
) -> Restart | Stop:
    """Restart or stop. `history`: the failures before this one, and the newest committed step now.

    An error of the user's code before the first step ends the run, because it would be raised again. For other failures, the
    first one since progress restarts at once; each further one waits twice as long, up to the cap. Out of memory and rollback
    have their own remedies and limits: they restart at once, and do not count among the others. `split`: of the failed attempt;
    None: not known, so there is no smaller micro-batch. `elsewhere`: there is room for enough workers without the failure's
    node, so the run can exclude it if its ranks die repeatedly.
    """
    if failure.kind == "aborted":
        return Stop(failure.cause, "the attempt was aborted on request")
    if not failure.heals:
        before = history.past[-1] if history.past else None
        if isinstance(split, FixedShapes) and split.recomputed and before and before.signature[0] == "out_of_memory":
            # The model has no blocks, for example: not what the user asked for ends the run, but what came before.
            return Stop(before.cause, f"activations cannot be recomputed: {failure.cause}; {_SAME_BITS}", before.rank)
        return Stop(failure.cause, "a restart would meet the same error")
    if _will_repeat(failure, history):
        while_ = "while the model was built" if failure.stage == "build" else "in the first step"
        return Stop(failure.cause, f"{while_}: a restart would meet the same error")
    if failure.kind == "out_of_memory":
        return _after_no_memory(failure, policy, split)
    if failure.kind == "rollback":
        done = sum(past.signature[0] == "rollback" for past in history.past)
        if done >= policy.max_rollbacks:
            return Stop(failure.cause, f"rolled back {done} times; recovery.max_rollbacks is {policy.max_rollbacks}")
        where = f"step {history.committed}" if history.committed else "the start"
        return Restart(0.0, f"rollback {done + 1} of {policy.max_rollbacks}: from {where}")
    stuck = [past for past in history.stuck() if past.signature[0] not in _OWN_LIMIT]
    n = len(stuck) + 1
    same = 1
    for past in reversed(stuck):
        if past.signature != failure.signature:
            break
        same += 1
    if same >= CRASH_LOOP:
        where = f"step {history.committed}" if history.committed else "the start"
        return Stop(failure.cause, f"the same cause {same} times with no step committed after {where}")
    if 0 <= policy.max_failures < n:
        return Stop(
            failure.cause,
            f"{n} failures without progress; recovery.max_failures is {policy.max_failures}",
        )
    budget = "no limit" if policy.max_failures < 0 else f"of {policy.max_failures}"
    after = 0.0 if n == 1 else min(policy.backoff_cap_s, policy.backoff_s * 2.0 ** (n - 2))
    because = f"failure {n} ({budget}) since step {history.committed}"
    if failure.node is not None and elsewhere and _in_a_row(failure, stuck) >= SUSPECT:
        return Restart(
            after,
            f"{because}; node {failure.node[:8]} is excluded: its ranks died or hung {SUSPECT} times in a row",
            exclude=failure.node,
        )
    return Restart(after, because)


def _will_repeat(failure: Failure, history: History) -> bool:
    """Whether an error before the attempt's first step is one of the user's code, which the next attempt would raise again.

    If the run has trained before, its code has worked, perhaps on other hosts: then only an error of all ranks while they build the
    model counts.
    """
    if history.committed:
        return failure.stage == "build" and failure.repeats == "on_all"
    return failure.repeats != "unknown"


def _in_a_row(failure: Failure, stuck: Sequence[Past]) -> int:
    """Deaths and hangs in a row of ranks on the failure's node, this one included."""
    if failure.kind not in _OF_A_NODE:
        return 0
    n = 1
    for past in reversed(stuck):
        if past.node != failure.node or past.signature[0] not in _OF_A_NODE:
            break
        n += 1
    return n


@dataclass(frozen=True, slots=True)
class Proceed:
    """Start an attempt of `workers` ranks: with the agents of the present group, or of a new one (`new_group`)."""

    workers: int
    new_group: bool
    because: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Check again soon."""

    because: str


SETTLE_S = 3.0
"""Ray takes up to this long to count the resources of ended workers as free."""


def resize(least: int, most: int, living: int, room: int, waited_s: float, policy: Policy) -> Proceed | Wait | Stop:
    """With how many workers the run continues: `least` to `most`. `living`: agents that are ready. `room`: workers for which the
    cluster has room now, the living ones included. `waited_s`: seconds since the last attempt ended.

    In this order: all workers, if they are ready; all, in a new group, if there is room; wait up to `wait_for_spare_s` for all; the
    workers that are ready, if they are enough; a smaller new group, when there is room for `least`.
    """
    if living >= most:
        return Proceed(most, False, "all workers are there")
    if room >= most:
        return Proceed(most, True, f"there is room for {most}")
    if least == most:
        return Proceed(most, True, "the number of workers is fixed")  # Ray waits for the room, and tells an autoscaler
    if waited_s >= policy.wait_for_spare_s:
        if living >= least:
            return Proceed(living, False, f"{living} of {most} workers are left, and {least} are enough")
        if room >= least and waited_s >= SETTLE_S:
            return Proceed(room, True, f"there is room for {room} of {most} workers, and {least} are enough")
    if waited_s < policy.wait_for_nodes:
        return Wait(f"{max(living, room)} of {least} workers")
    return Stop(
        f"there is room for {room} workers, and the run needs {least}",
        f"no nodes joined in {waited_s:.0f} s; recovery.wait_for_nodes sets how long to wait, cluster.workers how many are needed",
    )


_OWN_LIMIT = frozenset(["out_of_memory", "rollback"])
_SAME_BITS = "offload.optimizer: cpu, or parallel.strategy: zero3 on more workers need less, and have the same bits"


def _after_no_memory(failure: Failure, policy: Policy, split: Passes | None) -> Restart | Stop:
    remedy = (
        "more workers with parallel.strategy: zero3, offload.optimizer: cpu, train.checkpoint_activations: full, or a shorter "
        "model.context need less"
    )
    if isinstance(split, FixedShapes):
        return _with_fixed_shapes(failure, policy, split)
    if policy.on_oom == "stop":
        field = "data.batching.max_tokens" if isinstance(split, Budget) else "train.micro_batch"
        return Stop(failure.cause, f"recovery.on_oom is stop; a smaller {field}, {remedy}")
    smaller = split.smaller() if split is not None else None
    if split is None or smaller is None:
        return Stop(failure.cause, f"out of memory, and there is no smaller micro-batch; {remedy}")
    if isinstance(split, Budget):
        why = (
            f"out of memory: data.batching.max_tokens {smaller} (was {split.max_tokens}), and as much more accumulation"
        )
        return Restart(0.0, why, max_tokens=smaller)
    return Restart(
        0.0,
        f"out of memory with passes of {split.largest_pass} sequences: train.micro_batch {smaller} (was {split.micro_batch}), and "
        f"as much more accumulation",
        micro_batch=smaller,
    )


def _with_fixed_shapes(failure: Failure, policy: Policy, passes: FixedShapes) -> Restart | Stop:
    if policy.on_oom != "stop" and not passes.recomputed:
        why = (
            "out of memory: train.checkpoint_activations: full, which changes no bit; with train.virtual_ranks the shapes of "
            "passes stay as they are"
        )
        return Restart(0.0, why, recompute=True)
    tried = "recovery.on_oom is stop" if policy.on_oom == "stop" else "out of memory, and all blocks are recomputed"
    again = "" if passes.recomputed else "train.checkpoint_activations: full, "
    return Stop(failure.cause, f"{tried}; {again}{_SAME_BITS}")
