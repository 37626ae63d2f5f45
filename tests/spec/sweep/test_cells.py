"""A sweep's cells: stable ids and order, equal training tokens, and complete jobs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.errors import SpecError
from raydist.run.sweep_directory import CellNote, SweepDir
from raydist.spec import JobSpec, dump, load, parse
from raydist.spec.sweep import Cell, check, load_sweep, note, store
from raydist.spec.sweep.equal import adjusted
from raydist.worker.optim.schedule import peak_lr

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "jobs/quickstart.yaml"


def cells(folder: Path, text: str, *overrides: str) -> list[Cell]:
    """The cells of a sweep of the quickstart, all valid."""
    path = folder / "s.yaml"
    path.write_text(f"base: {QUICKSTART}\n{text}")
    sweep = load_sweep(path, overrides)
    found = sweep.cells()
    check(sweep, found)
    return found


def test_ids_are_the_same_for_ever(tmp_path: Path) -> None:
    """Ids name run folders, so they must not change: a later version must find the runs of this one."""
    found = cells(tmp_path, "name: lr-batch\narray: {parameters: {learning_rate: [1e-4], batch_size: [64, 128]}}")
    assert [c.id for c in found[:2]] == ["lr0.0001-batch64-3hqeq4j5", "lr0.0001-batch128-fhtvwjvj"]


def test_ids_tell_cells_apart_and_nothing_else(tmp_path: Path) -> None:
    """Sweep name, values and seed change the id; the order of parameters, and how a number is written, do not."""
    one = cells(tmp_path, "array: {parameters: {lr: [1, 2], clip: [3]}}")
    same = cells(tmp_path, "array: {parameters: [{optim.clip: 3.0}, {learning_rate: [2.0, 1.0]}]}")
    assert {c.id.rsplit("-", 1)[1] for c in one} == {c.id.rsplit("-", 1)[1] for c in same}
    named = cells(tmp_path, "name: other\narray: {parameters: {lr: [1, 2], clip: [3]}}")
    seeded = cells(tmp_path, "array: {parameters: {lr: [1, 2], clip: [3]}}", "train.seed=18")
    assert len({c.id for c in one + named + seeded}) == 6


def test_ids_are_names_of_runs(tmp_path: Path) -> None:
    """Ids are valid run names for any values: signs, spaces, lists, long texts."""
    found = cells(
        tmp_path,
        "array: {type: list, parameters: [{betas: [0.9, 0.95]}, {data.source: 'a b/*.txt'}, {weight_decay: 1e+20}, "
        f"{{model.options.x: -1}}, {{data.source: {'x' * 200}}}]}}",
        "model.name=tests.ownmodels:Own",
    )
    assert [c.id.rpartition("-")[0] for c in found] == [
        "betas0.9-0.95", "sourcea-b-.txt", "wd1e20", "x-1", f"source{'x' * 64}",
    ]  # fmt: skip
    assert all(parse({**yaml.safe_load(dump(c.job))}).name == c.id for c in found)


def test_order_and_seeds(tmp_path: Path) -> None:
    """All points with the first seed come first, then those with the next; more seeds change no existing id."""
    text = "array: {{parameters: {{lr: [1, 2], clip: [3, 4]}}, seeds: {}}}"
    three, one = cells(tmp_path, text.format(3)), cells(tmp_path, text.format(2))
    assert [c.id for c in three[:8]] == [c.id for c in one]
    assert [(c.index, c.point, c.seed, c.job.train.seed) for c in three] == [
        (i, i % 4, 17 + i // 4, 17 + i // 4) for i in range(12)
    ]
    assert [(c.job.optim.lr, c.job.optim.clip) for c in three[:4]] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert all(f"seed{c.seed}" in c.id for c in three)


def test_zip_and_list(tmp_path: Path) -> None:
    """zip takes the lists in parallel, and a single value is used for all; the entries of a list are cells, with the base's
    values for what they leave out."""
    zipped = cells(tmp_path, "array: {type: zip, parameters: {width: [64, 128], layers: [2, 3], lr: 1e-2}}")
    assert [(c.job.model.width, c.job.model.layers, c.job.optim.lr) for c in zipped] == [(64, 2, 0.01), (128, 3, 0.01)]
    listed = cells(tmp_path, "array: {type: list, parameters: [{width: 64}, {layers: 3, precision: bf16}]}")
    assert [(c.job.model.width, c.job.model.layers, c.job.precision.params) for c in listed] == [
        (64, 4, "fp32"), (128, 3, "bf16"),
    ]  # fmt: skip


DRAWS = """array: {{type: random, samples: {}, parameters: {{lr: {{log_uniform: [1e-4, 1e-2]}}, dropout: {{uniform: [0, 0.5]}},
  layers: {{int_uniform: [1, 4]}}, clip: {{choice: [0, 1]}}{}}}}}
search: {{seed: {}}}
"""


def values(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell.parameters[f] for f in ("optim.lr", "model.dropout", "model.layers", "optim.clip"))


def test_a_draw_is_a_function_of_its_number(tmp_path: Path) -> None:
    """More samples, or another parameter, leave earlier draws as they are; another seed changes all."""
    few = [values(c) for c in cells(tmp_path, DRAWS.format(20, "", 0))]
    assert [values(c) for c in cells(tmp_path, DRAWS.format(50, "", 0))][:20] == few
    assert [
        values(c) for c in cells(tmp_path, DRAWS.format(20, ", wd: {uniform: [0, 1]}".replace("wd", "weight_decay"), 0))
    ] == few
    assert not {v[0] for v in few} & {v[0] for v in map(values, cells(tmp_path, DRAWS.format(20, "", 1)))}


def test_parameters_are_drawn_apart(tmp_path: Path) -> None:
    """Two parameters of the same range get different values."""
    text = "array: {type: random, samples: 9, parameters: {lr: {uniform: [1, 2]}, clip: {uniform: [1, 2]}}}"
    assert all(c.job.optim.lr != c.job.optim.clip for c in cells(tmp_path, text))


def test_draws_have_their_distribution(tmp_path: Path) -> None:
    """Draws lie within their bounds, integer ends included, with 5 digits, and are uniform, or log-uniform where requested."""
    found = [values(c) for c in cells(tmp_path, DRAWS.format(2000, "", 0))]
    logs = [math.log10(v[0]) for v in found]
    assert -4 <= min(logs) < -3.99 < -2.01 < max(logs) <= -2
    # The mean of n uniform draws on a length L has standard deviation L / sqrt(12 n): 0.013. The bound is four times that.
    assert abs(sum(logs) / len(logs) + 3) < 0.052
    assert abs(sum(v[1] for v in found) / len(found) - 0.25) < 0.013
    assert {v[2] for v in found} == {1, 2, 3, 4}
    assert {v[3] for v in found} == {0, 1}
    assert all(float(f"{v[0]:.5g}") == v[0] for v in found)


def test_draws_that_repeat_are_one_cell(tmp_path: Path) -> None:
    """A point that is drawn twice is one cell."""
    found = cells(tmp_path, "array: {type: random, samples: 50, parameters: {lr: {choice: [1, 2, 3]}}}")
    assert sorted(c.job.optim.lr for c in found) == [1, 2, 3]
    assert [c.index for c in found] == [0, 1, 2]


def test_some_of_a_grid(tmp_path: Path) -> None:
    """search: random takes `samples` different cells of the grid; with more samples the first ones stay the same."""
    text = "array: {{parameters: {{lr: [1, 2, 3, 4], clip: [5, 6, 7]}}, samples: {}}}\nsearch: random"
    found = {n: [(c.job.optim.lr, c.job.optim.clip) for c in cells(tmp_path, text.format(n))] for n in (4, 9, 99)}
    assert found[9][:4] == found[4]
    assert sorted(found[99]) == list(itertools.product([1, 2, 3, 4], [5, 6, 7]))
    assert found[99] != sorted(found[99])


@pytest.mark.parametrize("name", ["optuna", "bayes"])
def test_a_search_chooses_its_own_points(tmp_path: Path, name: str) -> None:
    """A sweep whose search chooses points has no cells at the start; it makes one of each point that is chosen."""
    path = tmp_path / "s.yaml"
    path.write_text(f"base: {QUICKSTART}\n{DRAWS.format(5, '', 0)}".replace("search: {", f"search: {{name: {name}, "))
    sweep = load_sweep(path)
    assert sweep.cells() == []
    assert [axis.kind for axis in sweep.axes] == ["log_uniform", "uniform", "int_uniform", "values"]
    cell = sweep.cell({"optim.lr": 0.5, "model.layers": 2}, index=3, number=3)
    assert (cell.job.optim.lr, cell.job.model.layers, cell.index, cell.job.name) == (0.5, 2, 3, cell.id)
    assert sweep.cell({"optim.lr": -1}, 0, 0).problems == (
        f"{path}: optim.lr: -1: input should be greater than 0; see `raydist schema` or docs/reference/spec.md",
    )


def test_the_ends_of_a_search_are_looked_at(tmp_path: Path) -> None:
    """If only some extreme cells are invalid jobs, the sweep starts; if all are, it does not."""
    path = tmp_path / "s.yaml"
    text = "base: {}\narray: {{samples: 9, parameters: {{heads: {}, lr: [1, 2, 3]}}}}\nsearch: optuna"
    path.write_text(text.format(QUICKSTART, "[2, 5]"))
    sweep = load_sweep(path)
    check(sweep, sweep.cells())
    assert [bool(cell.problems) for cell in sweep.scouts()] == [False, True, True, False]
    assert (sweep.most(), sweep.most([{"optim.clip": 1}])) == (6, 7)
    path.write_text(text.format(QUICKSTART, "[5, 7]"))
    with pytest.raises(SpecError, match="5 does not divide width"):
        check(load_sweep(path), [])


@pytest.mark.parametrize("path", sorted((ROOT / "tune_sweeps").glob("*.yaml")), ids=lambda p: p.name)
def test_a_cell_is_what_the_loader_makes_of_its_fields(path: Path) -> None:
    """A cell's spec equals that of `raydist train BASE --set ...`; sections that it does not change are the base's objects."""
    sweep = load_sweep(path)
    for cell in sweep.cells():
        fields = {**cell.parameters, **cell.adjusted, "train.seed": cell.seed, "name": cell.id}
        assert (
            load(QUICKSTART, [f"{name}={yaml.safe_dump(v, default_flow_style=True)}" for name, v in fields.items()])
            == cell.spec
        )
        untouched = {"data", "offload", "recovery", "observe"}
        assert all(getattr(cell.job, section) is getattr(sweep.base, section) for section in untouched)


def test_a_base_with_a_deepspeed_file(tmp_path: Path) -> None:
    """A DeepSpeed file of the base has lower priority than a cell's own values, as with --set."""
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}')
    (tmp_path / "job.yaml").write_text(f"extends: {QUICKSTART}\ndeepspeed: ds.json\n")
    (tmp_path / "s.yaml").write_text("base: job.yaml\narray: {type: list, parameters: [{lr: 1}, {clip: 2}]}")
    found = load_sweep(tmp_path / "s.yaml").cells()
    ours = load(tmp_path / "job.yaml").optim.clip
    assert [(c.job.optim.clip, c.job.parallel.strategy) for c in found] == [(ours, "zero2"), (2, "zero2")]


@settings(deadline=None)
@given(
    steps=st.integers(1, 5000),
    batch=st.integers(1, 300),
    context=st.integers(1, 64),
    cell_batch=st.integers(1, 300),
    cell_context=st.integers(1, 64),
    eval_batches=st.integers(1, 20),
)
def test_equal_tokens(
    steps: int, batch: int, context: int, cell_batch: int, cell_context: int, eval_batches: int
) -> None:
    """A cell trains at least the base's tokens and less than a step more; its eval has at least the base's tokens and less than a
    batch more."""
    base = parse({
        "data": {"source": "x"}, "model": {"context": context}, "eval": {"batches": eval_batches},
        "train": {"steps": steps, "global_batch": batch, "micro_batch": 1},
    })  # fmt: skip
    fields, _ = adjusted(base, {"train.global_batch": cell_batch, "model.context": cell_context}, "tokens")
    a_step = cell_batch * cell_context
    over = fields.get("train.steps", steps) * a_step - steps * batch * context
    assert 0 <= over < a_step or (over == 0 and a_step == batch * context)
    assert 0 <= fields.get("eval.batches", eval_batches) * a_step - eval_batches * batch * context < a_step


def test_what_is_counted_in_steps_follows(tmp_path: Path) -> None:
    """Twice the batch: half the steps between evaluations and between checkpoints, half the warm-up; a cell's own values stay."""
    text = "array: {parameters: {batch_size: [64]}}"
    (cell,) = cells(tmp_path, text, "optim.schedule.warmup=20")
    job = cell.job
    assert (job.train.steps, job.eval.every, job.checkpoint.every, job.optim.schedule.warmup) == (100, 25, 25, 10)
    assert job.eval.batches == 4
    (cell,) = cells(tmp_path, "array: {parameters: {batch_size: [64], eval.every: 40, eval.batches: 3, warmup: 0.5}}")
    assert (cell.job.eval.every, cell.job.eval.batches, cell.job.optim.schedule.warmup) == (40, 3, 0.5)
    (cell,) = cells(tmp_path, "array: {parameters: {batch_size: [64], schedule: wsd}}", "optim.schedule.warmup=20")
    assert cell.job.optim.schedule.warmup == 0.1  # a schedule given by name takes nothing from the base
    (cell,) = cells(tmp_path, text, "optim.schedule.warmup=0.1")
    assert cell.job.optim.schedule.warmup == 0.1
    (cell,) = cells(tmp_path, text + "\nequal: steps", "optim.schedule.warmup=20")
    assert (cell.job.train.steps, cell.job.eval.every, cell.job.optim.schedule.warmup) == (200, 50, 20)
    assert cell.job.eval.batches == 4


def test_epochs_are_equal_tokens_already(tmp_path: Path) -> None:
    """A base in epochs keeps them; its tokens are unknown before the data is, but steps between evaluations follow the batch."""
    (cell,) = cells(tmp_path, "array: {parameters: {batch_size: [64]}}", "train.epochs=2")
    assert (cell.job.train.epochs, cell.job.train.steps, cell.tokens, cell.job.eval.every) == (2, None, None, 25)


@pytest.mark.parametrize(
    ("batch", "workers", "micro"),
    [(64, 2, 8), (36, 2, 6), (100, 2, 5), (20, 2, 5), (6, 2, 3), (9, 2, 3), (7, 2, 7), (44, "[1, 4]", 1), (1, 1, 1)],
)
def test_the_micro_batch_is_made_to_fit(tmp_path: Path, batch: int, workers: Any, micro: int) -> None:
    """The micro-batch is the largest up to the base's 8 that divides a worker's share of the batch; a change is noted."""
    (cell,) = cells(tmp_path, f"array: {{parameters: {{batch_size: [{batch}]}}}}", f"cluster.workers={workers}")
    assert cell.job.train.micro_batch == micro
    assert (f"train.micro_batch is {micro}, for 8 does not divide {batch}" in cell.notes) is (micro != 8)


def test_held_out_text_that_does_not_come_out_even(tmp_path: Path) -> None:
    """If the base's eval tokens are not a multiple of a cell's batch, a note says that the cell evaluates on more."""
    (cell,) = cells(tmp_path, "array: {parameters: {batch_size: [48]}}")
    assert cell.notes == ("measured on 36,864 held-out tokens, the base on 32,768: global batches of 48 do not fit",)


@pytest.mark.parametrize(("rule", "power"), [("linear", 1.0), ("sqrt", 0.5)])
def test_learning_rate_follows_the_batch(tmp_path: Path, rule: str, power: float) -> None:
    """With scale_lr and base_batch in the sweep, each cell's peak learning rate follows its own batch."""
    found = cells(tmp_path, f"array: {{parameters: {{batch_size: [16, 32, 128], scale_lr: {rule}, base_batch: 32}}}}")
    peaks = [peak_lr(c.job.optim, c.job.train.global_batch) for c in found]
    assert peaks == pytest.approx([1e-3 * (b / 32) ** power for b in (16, 32, 128)])


def test_a_folder_gives_the_same_cells_again(tmp_path: Path) -> None:
    """The sweep.yaml in a sweep's folder loads to the same cells; stored cells are read back unchanged, with unknown keys
    ignored."""
    sweep = load_sweep(ROOT / "tune_sweeps/shape-zip.yaml")
    folder = SweepDir(tmp_path / "storage/shape-zip")
    assert not folder.exists()
    store(folder, sweep, sweep.cells())
    assert folder.exists()
    again = load_sweep(tmp_path / "storage/shape-zip/sweep.yaml")
    assert again.cells() == sweep.cells()
    assert folder.cells() == [note(c) for c in sweep.cells()]
    assert CellNote.from_dict({**note(sweep.cells()[0]).to_dict(), "later": 1}) == note(sweep.cells()[0])
    more = load_sweep(ROOT / "tune_sweeps/shape-zip.yaml")
    store(folder, more, more.cells()[:4])
    assert len(folder.cells()) == 4


def test_a_folder_refuses_other_cells_of_the_same_id(tmp_path: Path) -> None:
    """Another base would resume half-trained cells: it is refused, with the fields; fields of how the run is executed may
    change."""
    path, folder = ROOT / "tune_sweeps/lr-batch.yaml", SweepDir(tmp_path / "s")
    sweep = load_sweep(path)
    store(folder, sweep, sweep.cells())
    store(folder, load_sweep(path, ["cluster.workers=1", "recovery.max_failures=5"]), sweep.cells())
    with pytest.raises(SpecError) as caught:
        store(folder, load_sweep(path, ["model.width=64", "eval.batches=3"]), sweep.cells())
    assert "model.width: 128 then, 64 now\neval.batches: 8 then, 3 now" in caught.value.message
    assert caught.value.exit_code == 2


def test_a_cell_is_frozen_and_small() -> None:
    """A cell cannot be changed, and shares the base's sections, so that ten thousand cells fit in memory."""
    sweep = load_sweep(ROOT / "tune_sweeps/lr-batch.yaml")
    cell = sweep.cells()[0]
    assert isinstance(cell.spec, JobSpec)
    with pytest.raises(AttributeError):
        cell.seed = 5  # type: ignore[misc]
    shared = [name for name in JobSpec.model_fields if getattr(cell.spec, name) is getattr(sweep.base, name)]
    assert len(shared) == len(JobSpec.model_fields) - 5  # its own: name, train, optim, checkpoint and eval
