"""The root cause among many errors, and the decision after each failure, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raydist.cluster.run.recovery import CRASH_LOOP, Budget, FixedShapes, History, Restart, Split, Stop, decide
from raydist.cluster.run.root_cause import Failure, RankError, is_echo, root_cause
from raydist.spec import JobSpec

RESET = "[../gloo/transport/tcp/pair.cc:553] Connection reset by peer [127.0.0.1]:41"


class Policy:
    max_failures = 3
    backoff_s = 1.0
    backoff_cap_s = 5.0
    max_rollbacks = 3
    on_oom = "shrink_micro_batch"


class Unlimited(Policy):
    max_failures = -1


def raised(rank: int, type_name: str, message: str = "", at: float | None = None, *bases: str) -> RankError:
    return RankError(rank, type_name, message, f"Traceback of rank {rank}", at, bases=bases)


def died(rank: int) -> RankError:
    return RankError(rank, "WorkerDied", "process 17 on 10.0.0.3 exited without reporting an error", kind="worker_died")


PICKED = {
    "one alone": ([raised(3, "ValueError", "bad")], 3, "user_error", 0),
    "own error before the echo": (
        [raised(0, "RuntimeError", RESET, 10.0), raised(1, "ValueError", "bad", 10.1)], 1, "user_error", 1),
    "killed, and the other lost its peer": ([raised(0, "RuntimeError", RESET), died(1)], 1, "worker_died", 1),
    "own error, and the peers aborted on it": ([died(0), raised(1, "ValueError", "bad")], 1, "user_error", 1),
    "the earliest of two own errors": (
        [raised(0, "KeyError", "a", 7.0), raised(1, "ValueError", "b", 6.0)], 1, "user_error", 1),
    "no time is later than any": ([raised(0, "KeyError", "a"), raised(1, "ValueError", "b", 6.0)], 1, "user_error", 1),
    "the lowest rank of equals": ([raised(2, "KeyError", "a"), raised(1, "KeyError", "a")], 1, "user_error", 1),
    "nothing but echoes: the first": (
        [raised(0, "RuntimeError", RESET, 5.2), raised(1, "DistBackendError", "NCCL", 5.1)], 1, "communication", 1),
    "a lost node says more than a lost process": (
        [died(0), RankError(1, "NodeDied", "the node is gone", kind="node_died")], 1, "node_died", 1),
    "no memory in Python": ([raised(0, "MemoryError", ""), raised(1, "RuntimeError", RESET)], 0, "out_of_memory", 1),
    "no memory, by a subclass": (
        [raised(0, "_ArrayMemoryError", "", None, "MemoryError")], 0, "out_of_memory", 0),
    "no memory, as torch's CPU allocator has it": (
        [raised(1, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")], 1,
        "out_of_memory", 0),
    "killed for memory": (
        [RankError(1, "OutOfMemory", "killed", kind="out_of_memory"), raised(0, "RuntimeError", RESET)], 1, "out_of_memory", 1),
    "a rollback": ([raised(0, "Rollback", "step 5"), raised(1, "Rollback", "step 5")], 0, "rollback", 1),
    "a hung rank, and one that timed out on it": (
        [raised(0, "RuntimeError", "Timed out waiting 1800000ms for recv operation"),
         RankError(1, "WorkerHung", "no answer", kind="worker_hung")], 1, "worker_hung", 1),
    "a stopped run is no echo though it tells of a peer": (
        [raised(0, "GraphMismatch", "connection reset by peer", 9.0, "TrainingStopped"), died(1)], 0, "user_error", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKED)
def test_the_root_cause_is_one_ranks(name: str) -> None:
    """The error that explains the others is chosen, with its kind and the number of echoes."""
    errors, rank, kind, echoes = PICKED[name]
    failure = root_cause(errors)
    assert (failure.rank, failure.kind, failure.echoes) == (rank, kind, echoes)
    assert failure == root_cause(errors[::-1])


def test_the_cause_is_one_line_and_the_traceback_that_ranks() -> None:
    """The cause is the type and the first line of the message; the traceback is unchanged."""
    failure = root_cause([raised(1, "ValueError", "\n bad\nmore"), raised(0, "RuntimeError", RESET)])
    assert failure.cause == "ValueError: bad"
    assert failure.traceback == "Traceback of rank 1"


@pytest.mark.parametrize(
    ("type_name", "message", "echo"),
    [
        (
            "CheckpointError",
            "the last checkpoint failed twice: RuntimeError: Read error: Connection reset by peer",
            True,
        ),
        ("CheckpointError", "the last checkpoint failed twice: No space left on device", False),
        ("ConnectionResetError", "", True),
        ("DistStoreError", "wait timeout after 300000ms", True),
        ("RuntimeError", "Broken pipe", True),
        ("RuntimeError", "NCCL communicator was aborted on rank 1", True),
        ("RuntimeError", "op.preamble.length <= op.nbytes. 8 vs 4", False),
        ("RuntimeError", "Detected mismatch between collectives on ranks", False),
        ("ValueError", "connection reset by peer", False),
        ("NonFinite", "loss is nan at step 3", False),
    ],
)
def test_what_counts_as_an_echo(type_name: str, message: str, echo: bool) -> None:
    """Lost peers are echoes; a shape mismatch, or any error of another type, is not."""
    assert is_echo(raised(0, type_name, message)) is echo


@pytest.mark.parametrize(
    ("type_name", "bases", "heals"),
    [
        ("SpecError", (), False),
        ("DataError", (), False),
        ("NonFinite", (), False),
        ("GraphMismatch", (), False),
        ("SpecChanged", (), False),
        ("TheirOwn", ("TheirOwn", "TrainingStopped", "Exception"), False),
        ("WorkerFailed", (), True),
        ("CheckpointCorrupt", (), True),
        ("StorageError", (), True),
        ("ValueError", ("ValueError", "Exception"), True),
    ],
)
def test_what_a_restart_can_heal(type_name: str, bases: tuple[str, ...], heals: bool) -> None:
    """A restart does not heal errors in the job or in the numbers; it may heal errors of storage and processes."""
    assert root_cause([raised(0, type_name, "x", None, *bases)]).heals is heals


def built(rank: int, type_name: str, message: str = "", *bases: str, stage: str = "build", line: int = 7) -> RankError:
    trace = f'Traceback:\n  File "raydist/worker/build.py", line 40\n  File "mine.py", line {line}, in build\n'
    return RankError(rank, type_name, message, trace, bases=bases, stage=stage)


def first(rank: int, type_name: str, message: str = "", *bases: str, line: int = 7) -> RankError:
    return built(rank, type_name, message, *bases, stage="first_step", line=line)


SHAPES = "mat1 and mat2 shapes cannot be multiplied (8x16 and 8x16)"
GONE_FILE = "[Errno 2] No such file or directory: 'weights.pt'"
REPEATS: dict[str, tuple[list[RankError], str]] = {
    "a bug in build": ([built(0, "KeyError", "'wte'")], "on_all"),
    "the same on two ranks": ([built(0, "ValueError", "rank 0"), built(1, "ValueError", "rank 1")], "on_all"),
    "on one rank, which others have lost": ([built(1, "ValueError", "a"), built(0, "RuntimeError", RESET)], "on_rank"),
    "other errors on other ranks": ([built(0, "ValueError", "a"), built(1, "KeyError", "b")], "on_rank"),
    "another line": ([built(0, "ValueError", "a"), built(1, "ValueError", "a", line=8)], "on_rank"),
    "a module that cannot be imported": ([built(0, "ModuleNotFoundError", "No module named 'networkx'", "ImportError")], "on_all"),
    "a shape in the graph check": ([built(0, "RuntimeError", SHAPES), built(1, "RuntimeError", SHAPES)], "on_all"),
    "words of a device in Python's own error": ([built(0, "TypeError", "to() got an unexpected cuda", "TypeError")], "on_all"),
    "words of a device": ([built(0, "RuntimeError", "CUDA error: unspecified launch failure")], "unknown"),
    "a device": ([built(0, "AcceleratorError", "no kernel image", "RuntimeError")], "unknown"),
    "a link": ([built(0, "DistBackendError", "NCCL", "DistError", "RuntimeError")], "unknown"),
    "gloo, which says RuntimeError": ([built(0, "RuntimeError", "Gloo connectFullMesh failed")], "unknown"),
    "the web": ([built(0, "ConnectTimeout", "", "TransportError", "HTTPError")], "unknown"),
    "the hub": ([built(0, "OSError", "We couldn't connect to load the files", "OSError")], "unknown"),
    "storage": ([built(0, "OSError", "[Errno 5] Input/output error", "OSError")], "unknown"),
    "a file that no rank finds": (
        [built(r, "FileNotFoundError", GONE_FILE, "OSError") for r in (0, 1)], "on_all"),
    "a file that one host lacks": (
        [built(1, "FileNotFoundError", GONE_FILE, "OSError"), built(0, "RuntimeError", RESET)], "unknown"),
    "no memory": ([built(0, "MemoryError", "")], "unknown"),
    "a rank that died": ([built(0, "RuntimeError", RESET), died(1)], "unknown"),
    "injected": ([first(0, "InjectedError", "as of a bug")], "unknown"),
    "a shape in the first step": ([first(r, "RuntimeError", SHAPES) for r in (0, 1)], "on_all"),
    "in the first step of rank 1 only": ([first(1, "IndexError", "a"), first(0, "RuntimeError", RESET)], "unknown"),
    "in a later step": ([raised(0, "KeyError", "'wte'")], "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATS)
def test_what_comes_again(name: str) -> None:
    """Before the first step the user code's own exceptions will repeat; those of a device, a link, a file or a download may
    not."""
    errors, want = REPEATS[name]
    assert root_cause(errors).repeats == want


def again(repeats: str, stage: str = "build") -> Failure:
    return Failure("user_error", 0, "ValueError: a", repeats=repeats, stage=stage)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "committed", "stops"),
    [
        (again("on_all"), 0, True),
        (again("on_rank"), 0, True),
        (again("unknown"), 0, False),
        (again("on_all", "first_step"), 0, True),
        (again("on_all"), 50, True),  # the code was changed between two commands
        (again("on_rank"), 50, False),  # a new host lacks something
        (again("on_all", "first_step"), 50, False),
    ],
)
def test_what_comes_again_is_not_tried_again(failure: Failure, committed: int, stops: bool) -> None:
    """The first such failure ends the run, with the reason. If the run has trained before, only if all ranks report it while they
    build."""
    decision = decide(failure, History(committed=committed), Policy())
    assert isinstance(decision, Stop if stops else Restart)
    if stops:
        when = "while the model was built" if failure.stage == "build" else "in the first step"
        assert decision.because == f"{when}: a restart would meet the same error"


def fail(cause: str = "ValueError: a", *, heals: bool = True, kind: str = "user_error") -> Failure:
    return Failure(kind, 0, cause, heals=heals)  # type: ignore[arg-type]


def story(*past: tuple[str, int], committed: int) -> History:
    """A history of failures (cause, newest committed step at that time), and the step that is committed now."""
    history = History()
    for cause, step in past:
        history = history.at(step).then(fail(cause))
    return history.at(committed)


A, B, C = "ValueError: a", "KeyError: b", "OSError: c"
DECIDED: dict[str, tuple[Failure, History, type[Policy], Any]] = {
    "the first": (fail(A), story(committed=0), Policy, 0.0),
    "the second waits": (fail(B), story((A, 0), committed=0), Policy, 1.0),
    "the third waits twice as long": (fail(C), story((A, 0), (B, 0), committed=0), Policy, 2.0),
    "over budget": (fail(A), story((A, 0), (B, 0), (C, 0), committed=0), Policy, "4 failures without progress"),
    "progress resets the budget": (fail(A), story((A, 0), (B, 0), (C, 0), committed=50), Policy, 0.0),
    "only failures since progress count": (fail(B), story((A, 0), (C, 0), (A, 50), committed=50), Policy, 1.0),
    "a crash loop": (fail(A), story((A, 0), (A, 0), committed=0), Policy, "the same cause 3 times"),
    "a crash loop, numbers apart": (
        fail("OSError: pid 7"), story(("OSError: pid 5", 9), ("OSError: pid 66", 9), committed=9), Policy,
        "after step 9"),
    "another cause between breaks the loop": (fail(A), story((A, 0), (B, 0), committed=0), Policy, 2.0),
    "the same cause with progress is no loop": (fail(A), story((A, 10), (A, 20), committed=30), Policy, 0.0),
    "never heals": (fail("NonFinite: nan", heals=False), story(committed=99), Policy, "the same error"),
    "asked for": (fail(kind="aborted"), story(committed=0), Policy, "on request"),
    "no limit but the cap": (
        fail(A), story(*[(c, 0) for c in (A, B, C, A, B, C, A, B)], committed=0), Unlimited, 5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_decisions(name: str) -> None:
    """For each failure after each history: a delay in seconds, or the reason to stop."""
    failure, history, policy, want = DECIDED[name]
    decision = decide(failure, history, policy())
    if isinstance(want, float):
        assert isinstance(decision, Restart)
        assert decision.after_s == want
    else:
        assert isinstance(decision, Stop)
        assert decision.cause == failure.cause
        assert want in decision.because


def of(node: str | None, kind: str = "worker_died", cause: str = "WorkerDied: process 17") -> Failure:
    return Failure(kind, 1, cause, node=node)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "now", "elsewhere", "excluded"),
    [
        ([of("a")], of("a"), True, True),
        ([of("a")], of("a"), False, False),  # a bad node is better than no node
        ([], of("a"), True, False),
        ([of("b")], of("a"), True, False),
        ([of("a"), of("b", cause="WorkerDied: elsewhere")], of("a"), True, False),
        ([of("a")], of("a", "worker_hung", "RankHung: stopped"), True, True),
        ([of("a")], of("a", "user_error", "ValueError: a"), True, False),  # a user's error does not depend on the node
        ([of("a", "user_error", "ValueError: a")], of("a"), True, False),
        ([of(None)], of(None), True, False),
    ],
)
def test_a_node_on_which_ranks_die_in_a_row_is_left(
    before: list[Failure], now: Failure, elsewhere: bool, excluded: bool
) -> None:
    """Deaths and hangs in a row on the same node, with no other failure between, and room on other nodes."""
    history = History()
    for failure in before:
        history = history.then(failure)
    decision = decide(now, history, Unlimited(), elsewhere=elsewhere)
    assert isinstance(decision, Restart)
    assert decision.exclude == (now.node if excluded else None)
    assert ("is excluded" in decision.because) is excluded


def test_progress_clears_a_node() -> None:
    """If a step was committed between its deaths, a node is not avoided."""
    decision = decide(of("a"), History().then(of("a")).at(10), Policy(), elsewhere=True)
    assert isinstance(decision, Restart)
    assert decision.exclude is None


def test_a_death_that_moves_along_is_the_codes() -> None:
    """The same death on the node that replaced it is a crash loop, even if there is room on other nodes."""
    history = History().then(of("a")).then(of("a"))
    assert isinstance(decide(of("b"), history, Unlimited(), elsewhere=True), Stop)


def test_no_retries_are_asked_for() -> None:
    """max_failures 0 stops at the first failure."""

    class Never(Policy):
        max_failures = 0

    assert isinstance(decide(fail(), History(), Never()), Stop)


def test_a_long_life_of_rare_failures_goes_on() -> None:
    """If a step is committed between them, any number of equal failures is restarted."""
    history = History()
    for step in range(10 * CRASH_LOOP):
        history = history.at(step)
        assert isinstance(decide(fail(), history, Policy()), Restart)
        history = history.then(fail())


# (global batch, micro-batch, workers) -> (sequences of the largest pass, the next micro-batch)
SPLITS = {
    (32, 8, 2): (8, 4), (32, 1, 2): (1, None), (8, 8, 4): (2, 1), (27, 9, 1): (9, 3), (6, 6, 2): (3, 1), (10, 5, 1): (5, 2),
    (30, 6, 1): (6, 3), (7, 7, 3): (3, 1), (12, 4, 16): (1, None),
}  # fmt: skip


@pytest.mark.parametrize("numbers", SPLITS)
def test_a_smaller_micro_batch_at_least_halves_the_largest_pass(numbers: tuple[int, int, int]) -> None:
    """It divides the global batch, also if a rank's share was smaller than its micro-batch; None below one sequence."""
    split = Split(*numbers)
    assert (split.largest_pass, split.smaller()) == SPLITS[numbers]
    if (smaller := split.smaller()) is not None:
        assert Split(split.global_batch, smaller, split.replicas).largest_pass <= split.largest_pass / 2
        assert split.global_batch % smaller == 0


def test_out_of_memory_ends_after_few_restarts() -> None:
    """From 8 to 4, 2 and 1, each without delay, though the cause is the same and no step is committed; then a stop with the
    remedy."""
    history, micro, tried = History(), 8, []
    no_memory = fail("OutOfMemoryError: CUDA", kind="out_of_memory")
    while True:
        decision = decide(no_memory, history, Policy(), Split(32, micro, 2))
        if isinstance(decision, Stop):
            break
        assert decision.after_s == 0.0
        assert decision.micro_batch is not None
        tried.append(decision.micro_batch)
        history, micro = history.then(no_memory), decision.micro_batch
    assert tried == [4, 2, 1]
    assert "offload.optimizer: cpu" in decision.because
    after = decide(fail(A), history, Policy(), Split(32, 1, 2))
    assert isinstance(after, Restart)
    assert (after.after_s, after.micro_batch) == (0.0, None)


def test_out_of_memory_with_batching_halves_the_tokens() -> None:
    """Down to those that the longest sequence needs, which stays as long as it was, so the samples are the same; then it ends."""
    no_memory, history = fail("OutOfMemoryError: CUDA", kind="out_of_memory"), History()
    batching = {"max_tokens": 64, "min": 2, "global_tokens": 128}
    spec = JobSpec.model_validate(
        {"data": {"source": "any", "batching": batching}, "model": {"context": 50}, "train": {"steps": 1}}
    )
    tried = []
    while isinstance(
        found := decide(no_memory, history, Policy(), Budget(spec.data.batching.max_tokens, spec.longest)), Restart
    ):
        assert found.max_tokens is not None
        again = spec.with_max_tokens(found.max_tokens)
        assert JobSpec.model_validate(again.model_dump()).numbers("f") == spec.numbers("f")
        spec = again
        tried.append((found.max_tokens, spec.longest))
    assert tried == [(32, 32)]
    assert isinstance(found, Stop)


def test_out_of_memory_with_virtual_ranks_keeps_the_shapes() -> None:
    """Blocks are recomputed once; then it ends, and names what has the same bits."""
    no_memory = fail("OutOfMemoryError: CUDA", kind="out_of_memory")
    first, second = (decide(no_memory, History(), Policy(), FixedShapes(again)) for again in (False, True))
    assert isinstance(first, Restart)
    assert (first.recompute, first.after_s, first.micro_batch, first.max_tokens) == (True, 0.0, None, None)
    assert isinstance(second, Stop)
    assert "all blocks are recomputed; offload.optimizer: cpu, or parallel.strategy: zero3" in second.because
    # A model without blocks refuses in the next attempt: the run ends with what came first, and says why that was no remedy.
    refused = replace(fail("UserError: the model has no nn.ModuleList"), heals=False)
    after = History().then(replace(no_memory, rank=1))
    ended = decide(refused, after, Policy(), FixedShapes(True))
    assert isinstance(ended, Stop)
    assert (ended.cause, ended.rank) == (no_memory.cause, 1)
    assert f"cannot be recomputed: {refused.cause}; offload.optimizer: cpu" in ended.because
    for past in (History(), History().then(fail("rank 0 died"))):
        assert decide(refused, past, Policy(), FixedShapes(True)) == Stop(
            refused.cause, "a restart would meet the same error"
        )


def test_out_of_memory_is_never_tried_again_as_it_was() -> None:
    """If the user wants no other micro-batch, or the split is unknown, the run stops at once."""

    class Stopping(Policy):
        on_oom = "stop"

    no_memory = fail("MemoryError", kind="out_of_memory")
    assert isinstance(decide(no_memory, History(), Stopping(), Split(32, 8, 2)), Stop)
    assert isinstance(decide(no_memory, History(), Policy()), Stop)
    stopped = decide(no_memory, History(), Stopping(), FixedShapes(False))
    assert isinstance(stopped, Stop)
    assert "recovery.on_oom is stop; train.checkpoint_activations: full, offload" in stopped.because


def test_rollbacks_restart_at_once_up_to_their_limit() -> None:
    """Three rollbacks in a run, whatever was committed between them; they do not count as failures."""
    history, back = History(), fail("Rollback: step 5", kind="rollback")
    for step in (0, 0, 50):
        decision = decide(back, history.at(step), Policy())
        assert isinstance(decision, Restart)
        assert decision.after_s == 0.0
        history = history.at(step).then(back)
    first = decide(fail(A), history, Policy())
    assert isinstance(first, Restart)
    assert first.after_s == 0.0
    stopped = decide(back, history.at(90), Policy())
    assert isinstance(stopped, Stop)
    assert "recovery.max_rollbacks is 3" in stopped.because
