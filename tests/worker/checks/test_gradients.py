"""train.check_gradients on real ranks: bad gradients are named with their ranks, good ones are not, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from raydist import registry
from raydist.records import Event
from raydist.report import text
from raydist.spec import JobSpec
from raydist.worker.checks.gradients import NAMED, TOLERANCE, GradientCheck, judge
from raydist.worker.distributed import Rank
from raydist.worker.step import TrainStep
from raydist.worker.step_hooks import Step
from tests.training import CONTEXT, GROUPED, MODEL, Trainer, alone, counted, job, mesh_job, mine, run, samples
from tests.worker.checks.test_bad_steps import dataset, exact, of, spec_of, trained, weights

__all__ = ["dataset"]

ODD = "blocks.1.mlp.down.weight"


class Said:
    """Collects what is sent to a Reporter's `say`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def say(self, kind: str, **data: Any) -> None:
        self.events.append({"kind": kind, **data})


class Partly(nn.Module):
    """`rest` contributes to the loss of every step except those in `without`; `dead` contributes with weight zero."""

    def __init__(self, vocab: int, without: tuple[int, ...]) -> None:
        super().__init__()
        self.table, self.rest = nn.Embedding(vocab, vocab), nn.Linear(vocab, vocab)
        self.dead = nn.Parameter(torch.ones(vocab))
        self.without, self.step = without, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens -> logits."""
        out: torch.Tensor = self.table(tokens) + 0.0 * self.dead
        return out if self.step in self.without else out + self.rest(out)


class Checked:
    """A trainer that checks gradients every `every` steps."""

    def __init__(self, rank: Rank, spec: JobSpec, model: nn.Module | None = None, every: int = 1) -> None:
        self.trainer = trainer = Trainer(rank, spec, full=6 * CONTEXT, model=model)
        self.said = Said()
        check = GradientCheck(rank, trainer.parameters, every, self.said if rank.first else None)  # type: ignore[arg-type]
        self.check = check
        self.step = TrainStep(
            trainer.mesh, trainer.strategy, trainer.optimizer, trainer.precision, parameters=trainer.parameters,
            full_tokens=6 * CONTEXT, clip=0.5, split=trainer.split, hooks=[check],
        )  # fmt: skip

    def run(self, number: int) -> float:
        batches = mine(self.trainer.rank, *samples(6, seed=number), 2, self.trainer.mesh.tensor)
        return self.step(number, batches, counted(batches), 1e-2, False).loss

    def told(self) -> list[dict[str, Any]]:
        """The events without notes."""
        return [e for e in self.said.events if e["kind"] == "gradients"]


def calm(rank: Rank, variant: str, precision: str, tensor: int = 1) -> tuple[bool, list[dict[str, Any]]]:
    """Whether four steps have the same losses and weights with a check each step as without; and the reported events."""
    spec = mesh_job(variant, tensor, MODEL, precision=precision)
    looked, plain = (Checked(rank, spec, every=every) for every in (1, 100))
    same = [looked.run(step) for step in (1, 2, 3, 4)] == [plain.run(step) for step in (1, 2, 3, 4)]
    others = plain.trainer.whole()
    same = same and all(torch.equal(value, others[name]) for name, value in looked.trainer.whole().items())
    return same, looked.told()


SORTS = [*((name, "fp32") for name in [*registry.names("parallel"), *GROUPED.values()]), ("ddp", "bf16")]


@pytest.mark.parametrize(("variant", "precision"), SORTS)
def test_a_clean_run_has_the_same_bits_and_nothing_to_say(ranks: Any, variant: str, precision: str) -> None:
    """On 4 ranks with a check each step: no event, and losses and weights equal those without the check, bit for bit."""
    assert run(ranks, calm, 4, variant, precision) == [(True, [])] * 4


@pytest.mark.parametrize("variant", ["ddp", "zero3"])
def test_parts_of_a_mesh_are_not_taken_for_replicas(ranks: Any, variant: str) -> None:
    """The same on dp 2 x tensor 2, where only ranks with the same part must have the same gradients."""
    assert run(ranks, calm, 4, variant, "fp32", 2) == [(True, [])] * 4


def spoil_ddp(made: Checked, odd: int, factor: float) -> None:
    """From now on rank `odd` gets other sums than the others: its buckets are multiplied after the all-reduce."""
    rank = made.trainer.rank

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(rank.world_size), async_op=True)
        assert work is not None

        def back(done: Any) -> torch.Tensor:
            sums: torch.Tensor = done.value()[0]
            named = dict(made.trainer.model.named_parameters())
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if rank.rank == odd and parameter is named[ODD]:
                    grad.mul_(factor)
            return sums

        return work.get_future().then(back)

    hook.__annotations__.clear()  # torch compares them, and ours are strings
    made.trainer.strategy.module.register_comm_hook(None, hook)  # type: ignore[operator]


def spoilt(rank: Rank, variant: str, odd: int, factor: float) -> list[dict[str, Any]]:
    """The events of three steps in which rank `odd` has a different gradient of one parameter than its replicas."""
    made = Checked(rank, job(variant))
    if variant == "ddp":
        spoil_ddp(made, odd, factor)
    elif rank.rank == odd:
        # FSDP calls it with the reduced gradient.
        parameter = dict(made.trainer.model.named_parameters())[ODD]
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(factor))  # type: ignore[no-untyped-call, union-attr]
    for step in (1, 2, 3):
        made.run(step)
    return made.told()


@pytest.mark.parametrize(
    ("variant", "world", "named"), [("ddp", 3, [1]), ("ddp", 2, [0, 1]), ("hsdp in pairs", 4, [1, 3])]
)
def test_a_gradient_that_differs_is_named(ranks: Any, variant: str, world: int, named: list[int]) -> None:
    """Rank 1 has 0.1% more in one parameter: reported once, with that rank if there is a majority, else with all replicas."""
    (told,) = run(ranks, spoilt, world, variant, 1, 1.001)[0]
    (problem,) = told["problems"]
    assert (told["step"], told["count"]) == (1, 1)
    assert (problem["parameter"], problem["problem"], problem["ranks"]) == (ODD, "differs", named)
    assert problem["most"] == pytest.approx(1.001 * problem["least"], rel=1e-4)


def test_a_gradient_that_is_nan_on_one_rank_is_named(ranks: Any) -> None:
    """The NaN appears after the sync, so only that rank has it. The step is refused as always, which the other ranks do not see."""
    results = ranks.run(poisoned, 3)
    assert [p for e in results[0] for p in e["problems"]] == [{"parameter": ODD, "problem": "not_finite", "ranks": [2]}]


def poisoned(rank: Rank) -> list[dict[str, Any]]:
    """The events of a check in which rank 2 has NaN in one parameter's sum."""
    made = Checked(rank, job("ddp"))
    spoil_ddp(made, 2, float("nan"))
    trainer, batches = made.trainer, mine(rank, *samples(6), 6)
    with trainer.strategy.accumulate(last=True):
        from raydist.worker.step import loss_sum

        loss_sum(trainer.strategy.module, batches[0]).backward()  # type: ignore[no-untyped-call]
    trainer.strategy.finish_grads()
    made.check.gradients_ready(Step(1, []))
    return made.told()


def partly(rank: Rank, variant: str) -> list[dict[str, Any]]:
    """The events of four steps: in the second and third, two parameters take no part in the loss."""
    model = Partly(13, without=(2, 3))
    made = Checked(rank, job(variant), model=model)
    for step in (1, 2, 3, 4):
        model.step = step
        made.run(step)
    return made.told()


@pytest.mark.parametrize(("variant", "world"), [("ddp", 1), ("zero3", 2), ("hsdp in pairs", 4)])
def test_missing_and_zero_gradients_are_named(ranks: Any, variant: str, world: int) -> None:
    """A parameter without gradient on all ranks, and one whose gradient is all zero, are reported when that changes, and not in
    between."""
    told = run(ranks, partly, world, variant)[0]
    every = list(range(world))
    dead = {"parameter": "dead", "problem": "zero", "ranks": every}
    absent = [{"parameter": f"rest.{name}", "problem": "missing", "ranks": every} for name in ("weight", "bias")]
    assert [(e["step"], sorted(e["problems"], key=str)) for e in told] == [
        (1, [dead]),
        (2, sorted([*absent, dead], key=str)),
        (4, [dead]),
    ]


def test_the_whole_loop(ranks: Any, dataset: str, tmp_path: Path) -> None:
    """train.check_gradients: 2 in a run: one note with the cost of a check, no other event, weights as without it, bit for bit."""
    raw = spec_of(dataset).model_dump()
    spec = JobSpec.model_validate(raw | {"train": raw["train"] | {"check_gradients": 2}})
    steps, events, error = run(ranks, trained, 2, spec, str(tmp_path / "checked"))[0]
    assert error is None
    (note,) = [e["text"] for e in of(events, "note") if "check_gradients" in e["text"]]
    assert note.startswith("train.check_gradients: 2: a look takes ")
    assert note.endswith("% of the time")
    assert of(events, "gradients") == []
    plain, _, _ = run(ranks, trained, 2, spec_of(dataset), str(tmp_path / "plain"))[0]
    assert exact(steps) == exact(plain)
    assert weights(tmp_path / "checked") == weights(tmp_path / "plain")


def test_bad_numbers_are_told_beside_what_on_nan_does(dataset: str, tmp_path: Path) -> None:
    """A batch that makes the loss NaN at step 5: `gradients` names parameters; `non_finite` and the skip are as without the
    check."""
    from tests.worker.checks.test_bad_steps import sample

    raw = spec_of(dataset, "skip", {"poison": sample(dataset, 5)[0]}).model_dump()
    spec = JobSpec.model_validate(raw | {"train": raw["train"] | {"check_gradients": 1}})
    steps, events, error = trained(alone(), spec, str(tmp_path))
    assert error is None
    assert len(steps) == 8
    assert [e["action"] for e in of(events, "non_finite")] == ["skip"]
    (told,) = of(events, "gradients")
    assert told["step"] == 5
    assert {(p["problem"], *p["ranks"]) for p in told["problems"]} == {("not_finite", 0)}
    assert told["count"] > NAMED - 1 or told["count"] == len(told["problems"])


def test_a_run_with_one_look_tells_its_cost_too(dataset: str, tmp_path: Path) -> None:
    """The cost is reported at the end, without a share of the time, since there is no interval between two checks."""
    raw = spec_of(dataset).model_dump()
    spec = JobSpec.model_validate(raw | {"train": raw["train"] | {"check_gradients": 5}})
    _, events, _ = trained(alone(), spec, str(tmp_path))
    (note,) = [e["text"] for e in of(events, "note") if "check_gradients" in e["text"]]
    assert note.startswith("train.check_gradients: 5: a look takes ")
    assert note.endswith(" ms")


def test_an_overflow_in_fp16_is_no_problem() -> None:
    """Its gradients are infinite and the scale is halved, as always; nothing is reported."""
    precision = {"params": "fp16", "loss_scale": {"initial": 2.0**40}}
    made = Checked(alone(), job("ddp", precision=precision))
    made.run(1)
    assert made.trainer.precision.loss_scale == 2.0**39
    assert made.told() == []


def test_judgement_by_hand() -> None:
    """Two parameters on four ranks in pairs: values within tolerance are equal; in a pair that differs neither rank is in the
    minority."""
    whole, pairs = ((0, 1, 2, 3),), ((0, 2), (1, 3))
    near = 1 + TOLERANCE / 2
    norms = np.array([[1.0, 2.0, 0.0], [near, 3.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.5, 0.0]])
    assert judge(["a", "b", "c"], [whole, pairs, whole], norms) == [
        {"parameter": "b", "problem": "differs", "ranks": [1, 3], "least": 3.0, "most": 3.5},
        {"parameter": "c", "problem": "zero", "ranks": [0, 1, 2, 3]},
    ]
    norms[2, 0], norms[3, 0] = -1.0, np.nan
    assert judge(["a", "b", "c"], [whole, pairs, whole], norms)[:2] == [
        {"parameter": "a", "problem": "missing", "ranks": [2]},
        {"parameter": "a", "problem": "not_finite", "ranks": [3]},
    ]


def test_it_reads_as_a_sentence() -> None:
    """The event as one line: parameter, problem, ranks, norms, and how many more."""
    problems = [
        {"parameter": "a", "problem": "differs", "ranks": [1], "least": 1.0, "most": 2.0},
        {"parameter": "b", "problem": "missing", "ranks": [0, 1]},
    ]
    told = text.event(Event("gradients", 0.0, {"step": 4, "problems": problems, "count": 5}))
    assert told == "step 4: the gradient of a differs on rank 1 (norms 1 to 2); b is missing on ranks 0, 1; and 3 more"
