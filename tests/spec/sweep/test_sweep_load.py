"""A sweep's file is loaded as a whole, or all its problems are reported at once: file, field, value, remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raydist.cli.schema import sweep_schema
from raydist.errors import SpecError
from raydist.spec import load
from raydist.spec.sweep import SweepSpec, check, load_sweep
from raydist.spec.sweep.models import SchedulerSpec, options_for
from raydist.spec.sweep.names import SHORT, field
from raydist.spec.validate import everywhere

ROOT = Path(__file__).parents[3]
SWEEPS = sorted((ROOT / "tune_sweeps").glob("*.yaml"))
QUICKSTART = ROOT / "jobs/quickstart.yaml"


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The problems of a sweep of the quickstart, one line each, without the file's name."""
    path = folder / "sweep.yaml"
    path.write_text(f"base: {QUICKSTART}\n{text}" if "base:" not in text else text)
    with pytest.raises(SpecError) as caught:
        sweep = load_sweep(path, overrides)
        check(sweep, sweep.cells())
    assert caught.value.exit_code == 2
    return [line.removeprefix(f"{path}: ") for line in caught.value.message.splitlines()]


def test_the_issue_s_own_file_runs_as_it_stands() -> None:
    """Nine cells in order, the last parameter fastest, each with the base's number of tokens, named after the file."""
    sweep = load_sweep(ROOT / "tune_sweeps/lr-batch.yaml")
    cells = sweep.cells()
    check(sweep, cells)
    assert sweep.name == "lr-batch"
    assert [(c.job.optim.lr, c.job.train.global_batch, c.job.train.steps) for c in cells] == [
        (lr, batch, 200 * 32 // batch) for lr in (1e-3, 3e-3, 1e-2) for batch in (8, 16, 32)
    ]
    assert {c.tokens for c in cells} == {200 * 32 * 128}
    assert (sweep.spec.array.concurrent, sweep.spec.limits.cost_per_gpu_hour, sweep.spec.objective.better) == (
        3,
        2.5,
        "min",
    )


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.name)
def test_every_sweep_is_valid_and_names_the_schema(path: Path) -> None:
    """Each YAML in tune_sweeps/ fits the schema that its first line names, and all its cells are valid jobs."""
    text = path.read_text()
    first = text.splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = json.loads((path.parent / first.split("=", 1)[1]).read_text())
    jsonschema.validate(yaml.safe_load(text), schema)
    sweep = load_sweep(path)
    cells = sweep.cells()
    check(sweep, cells)
    assert len(sweep.scouts() if sweep.spec.search.chooses else cells) >= 3


def test_the_written_schema_is_today_s() -> None:
    """docs/reference/sweep-spec.schema.json is what `raydist schema --sweep` prints, written by `make docs`; each field has
    help."""
    written = json.loads((ROOT / "docs/reference/sweep-spec.schema.json").read_text())
    assert written == json.loads(json.dumps(sweep_schema()))
    for name, section in {"sweep": written, **written["$defs"]}.items():
        for field_name, prop in section["properties"].items():
            # If field and section have the same help, Pydantic writes it only at the section.
            about = prop.get("description") or written["$defs"][prop["$ref"].rsplit("/", 1)[-1]]["description"]
            assert about, f"{name}.{field_name}"


@pytest.mark.parametrize(
    "text", ["array: {parameters: {learning_rat: [1]}}", "array: {parameters: []}", "base: x\nlimits: {hour: 1}"]
)
def test_the_schema_refuses_what_the_loader_refuses(text: str, tmp_path: Path) -> None:
    """The schema refuses an unknown parameter, an empty list of parameters, and an unknown field, so that an editor marks
    them."""
    problems(tmp_path, text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"base": "x", **yaml.safe_load(text)}, sweep_schema())


def test_every_short_name_is_a_field_of_the_job() -> None:
    """Each short name stands for an existing field; each field's full name stands for itself, except a job's name."""
    fields = everywhere(type(load(QUICKSTART)))
    assert set(SHORT.values()) <= set(fields)
    assert all(field(name) == name for name in fields if name not in ("name", "deepspeed"))
    assert field("name") is None
    assert field("model.options.rope") == "model.options.rope"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GRID {learning_rat: [1]}}",
         'array.parameters.learning_rat: unknown parameter; did you mean "learning_rate"?'),
        ("GRID {optim.lrr: [1]}}", 'array.parameters.optim.lrr: unknown parameter; did you mean "optim.lr"?'),
        ("GRID {eps: [1]}}", 'array.parameters.eps: unknown parameter; did you mean "optim.eps"?'),
        ("GRID {data.path: ['s3://K:S@b/x', /y]}}",
         "array.parameters.data.path: ['s3://b/x', '/y'] was given with secrets; leave them to the nodes' environment"),
        ("GRID {lr: []}}", "array.parameters.lr: an empty list has no value; give at least one"),
        ("GRID [{lr: [1], clip: [2]}]}", "array.parameters[0]: has 2 names; write one an entry, `- name: [values]`"),
        ("GRID {lr: [1], learning_rate: [2]}}",
         "array.parameters.learning_rate: is optim.lr, as lr is; take one of them"),
        ("GRID {lr: [1e-3, 0.001]}}",
         "array.parameters.lr: 0.001 stands twice; leave one out, or repeat cells by array.seeds"),
        ("GRID {lr: {uniform: [0, 1]}}}",
         "array.parameters.lr: uniform is drawn, and array.type is parameter_sweep; write array.type: random, "
         "with samples: N"),
        ("DRAWN {lr: {log_uniform: [0, 1]}}}",
         "array.parameters.lr: log_uniform: 0 has no logarithm; begin above 0, or use uniform"),
        ("DRAWN {lr: {uniform: [2, 1]}}}",
         "array.parameters.lr: uniform: [2, 1] does not ascend; write the lowest first"),
        ("DRAWN {lr: {uniform: 3}}}",
         "array.parameters.lr: uniform: 3 is no range; write {uniform: [lowest, highest]}"),
        ("DRAWN {width: {int_uniform: [1, 2.5]}}}",
         "array.parameters.width: int_uniform: [1, 2.5] are not whole numbers; write whole ones, or use uniform"),
        ("array: {type: random, parameters: {lr: {uniform: [1, 2]}}}",
         "array.samples: is needed by array.type: random; set the number of cells to draw"),
        ("array: {samples: 3, parameters: {lr: [1]}}",
         "array.samples: 3 has no effect: a parameter_sweep has its own cells; leave it out, or search: random"),
        ("array: {type: zip, parameters: {lr: [1, 2], clip: [1, 2, 3]}}",
         "array.parameters: lists of different lengths cannot be zipped (lr 2, clip 3); make them equal"),
        ("array: {type: list, parameters: [{lr: 1}, {}]}", "array.parameters[1]: is empty; give at least one value"),
        ("GRID {steps: [1, 2]}}",
         "array.parameters.steps: equal: tokens decides on the steps; write equal: steps, or leave it out"),
        ("array: {seeds: 2, parameters: {seed: [1, 2]}}",
         "array.parameters.seed: array.seeds has seeds of its own; take one of them"),
        ("GRID {lr: [1]}}\nscheduler: {name: asha, every: 5}",
         "scheduler.every: 5 has no effect with asha; it is for median and pbt"),
        ("GRID {lr: [1]}}\nscheduler: {name: asha, rungs: [2, 1]}",
         "scheduler.rungs: [2, 1] do not ascend; write [1, 2]"),
        ("GRID {lr: [1]}}\nscheduler: ahsa", 'scheduler.name: unknown "ahsa"; did you mean "asha"? one of your own is '
         "package.module:build"),
        ("GRID {lr: [1]}}\nscheduler: {name: asha, rungs: [900000]}",
         "scheduler.rungs: 900,000 tokens are not reached before the end of a cell of 819,200; lower it, or "
         "train longer"),
        ("GRID {lr: [1]}}\nobjective: {metric: eval_los}",
         'objective.metric: unknown \'eval_los\'; did you mean "eval_loss"?'),
        ("GRID {width: [64, 128]}}\nscheduler: pbt",
         "array.parameters.width: cannot change while a cell trains, as pbt needs; it can change optim.lr, "
         "optim.weight_decay, optim.betas, optim.eps, optim.momentum, optim.clip"),
        ("DRAWN {lr: {uniform: [1, 2]}}}\nsearch: grid",
         "search.name: 'grid' needs a grid, and array.type is random; leave it out, or optuna"),
        ("array: {parameters: {lr: [1, 2]}}\nsearch: bayes",
         "array.samples: is needed by search.name: bayes; set the number of cells to draw"),
        ("array: {type: zip, samples: 3, parameters: {lr: [1, 2]}}\nsearch: optuna",
         "search.name: 'optuna' cannot choose in a zip; array.type: random or parameter_sweep"),
        ("DRAWN {lr: {uniform: [1, 2]}}}\nsearch: bayes\nscheduler: pbt",
         "search.name: 'bayes' and pbt both choose values; take one of them"),
        ("DRAWN {lr: {uniform: [1, 2]}}}\nsearch: optuna\nscheduler: {name: asha, rungs: [900000]}",
         "scheduler.rungs: 900,000 tokens are not reached before the end of a cell of 819,200; lower it, or "
         "train longer"),
        ("DRAWN {heads: 5, lr: {uniform: [1, 2]}}}\nsearch: optuna",
         "model.heads: 5 does not divide width 128; try 2 or 4 or 8"),
        ("GRID {eval.every: [null]}}",
         "eval.every: is null, so eval_loss is never reported; set it, or objective.metric: loss"),
    ],
)  # fmt: skip
def test_one_problem_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    """Each mistake gives one line with the field, what is wrong, and what to write."""
    text = text.replace("DRAWN ", "array: {type: random, samples: 2, parameters: ").replace(
        "GRID ", "array: {parameters: "
    )
    lines = problems(tmp_path, text)
    assert len(lines) == 1
    assert lines[0].partition(" (in ")[0] == expected


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Problems of the file, its parameters, the command line and the base are reported together, one line each."""
    (tmp_path / "job.yaml").write_text("data: {source: x}\ntrain: {steps: 3}\noptim: {lrr: 1}\n")
    text = "base: job.yaml\narray: {parameters: {learning_rat: [1]}}\nlimits: {hour: 3}\n"
    lines = problems(tmp_path, text, "train.micro_batch=3")
    assert [line.split(": ")[0 if i < 2 else 1] for i, line in enumerate(lines)] == [
        "limits.hour", "array.parameters.learning_rat", "train.global_batch", "optim.lrr",
    ]  # fmt: skip


def test_a_base_that_does_not_exist(tmp_path: Path) -> None:
    """The base's path is relative to the sweep's file, and a similar file name is suggested."""
    (tmp_path / "quickstart.yaml").write_text("")
    assert problems(tmp_path, "base: quikstart.yaml\narray: {parameters: {lr: [1]}}") == [
        f'base: {tmp_path}/quikstart.yaml: no such file; did you mean "{tmp_path}/quickstart.yaml"?'
    ]


def test_a_cell_s_problem_names_its_cells(tmp_path: Path) -> None:
    """A problem of three of six cells is one line, with their ids."""
    lines = problems(tmp_path, "array: {parameters: {lr: [1, 2, 3], heads: [4, 5]}}")
    assert len(lines) == 1
    assert lines[0].startswith("model.heads: 5 does not divide width 128; try")
    assert "(in lr1-heads5-" in lines[0]
    assert lines[0].count("heads5-") == 3


def test_overrides_change_the_base(tmp_path: Path) -> None:
    """`--set` changes the base, and cells train on the tokens of the changed base."""
    sweep = load_sweep(ROOT / "tune_sweeps/lr-batch.yaml", ["train.steps=20"], name="short")
    assert [c.job.train.steps for c in sweep.cells()[:3]] == [80, 40, 20]
    assert sweep.name == "short"


def test_when_schedulers_decide() -> None:
    """Without values in the file, rungs and intervals follow from a cell's tokens."""

    def options(**fields: Any) -> Any:
        return options_for(SchedulerSpec(**fields))

    assert options(name="asha").rungs_of(6400) == [100, 400, 1600]
    assert options(name="hyperband").rungs_of(2700) == [100, 300, 900]
    assert options(name="asha", rungs=[1e3, 5000]).rungs_of(6400) == [1000, 5000]
    assert (options(name="median").every_of(1000), options(name="median").grace_of(1000)) == (100, 200)


def test_a_resolved_spec_reads_back() -> None:
    """A resolved spec reads back equal, with its defaults written out or left out."""
    for path in SWEEPS:
        spec = load_sweep(path).spec
        assert SweepSpec.model_validate(spec.model_dump()) == spec
        assert SweepSpec.model_validate(spec.model_dump(exclude_defaults=True)) == spec
