"""A sweep's results come from its log and its cells' runs, whatever their status, with the conclusions."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from raydist.cluster.place import Ground
from raydist.errors import StorageError, UsageError
from raydist.report.html.sweep import render
from raydist.report.sweep import forecast, stats, tables
from raydist.report.sweep.figures import measure, spent
from raydist.report.sweep.results import best_job, tell, write_parquet
from raydist.run.directory import RunDir
from raydist.run.lease import DriverLease
from raydist.run.sweep_directory import SweepDir
from raydist.run.sweep_state import CellState, Stretch
from raydist.spec import JobSpec, dump, load
from raydist.storage import Storage
from tests.report.sweep.conftest import Swept, train

Make = Callable[..., Swept]
GRID = "array: {{parameters: {{lr: [1e-4, 1e-3, 1e-2], batch_size: [16, 32]}}, seeds: {}}}\nlimits: {{cost_per_gpu_hour: 3600}}"


def strict(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_figures_of_a_run(swept: Make) -> None:
    """The last eval loss and noise scale; the training loss over the last tenth by tokens, without NaN; pace and tokens of all
    steps."""
    made = swept("array: {parameters: {lr: [1]}}")
    keys = ("steps", "tokens", "loss", "eval_loss", "grad_noise_scale")

    def told(name: str) -> list[Any]:
        found = measure(made.folder.run(name))
        assert list(found) == [
            "steps",
            "tokens",
            "loss",
            "eval_loss",
            "tokens_per_second",
            "grad_noise_scale",
            "course",
        ]
        assert found["tokens_per_second"] == (pytest.approx(1000) if found["steps"] else None)
        return [found[key] for key in keys]

    train(made.folder.run("r"), made.cells[0], [5.0] * 18 + [2.0, 3.0], 2.25, noise=[None] * 18 + [40.0, None])
    assert told("r") == [20, 2000, 2.5, 2.25, 40.0]
    train(made.folder.run("q"), made.cells[0], [5.0] * 18 + [2.0, math.nan], None)
    assert told("q") == [20, 2000, 2.0, None, None]
    assert told("never") == [0, 0, None, None, None]


def test_a_row_a_point(swept: Make) -> None:
    """With three seeds each: mean and Student's interval of the objective, total costs, all runs."""
    made = swept(GRID.format(3))
    for i in range(len(made.cells)):
        made.finish(i, 2.0 + 0.1 * made.cells[i].point + 0.01 * made.cells[i].seed)
    told = strict(tell(made.folder))
    assert [row["parameters"] for row in told["points"]] == [dict(c.parameters) for c in made.cells[:6]]
    row = told["points"][4]
    values = [2.4 + 0.01 * seed for seed in (17, 18, 19)]
    assert row["values"] == pytest.approx(values)
    assert (row["objective"], row["low"], row["high"]) == pytest.approx(stats.interval(values))
    assert (row["seeds"], row["tokens"], row["status"], row["failures"]) == (3, 3 * 12800, "finished", 0)
    assert row["cells"] == [c.id for c in made.cells if c.point == 4]
    assert row["runs"] == [made.folder.run(c).uri for c in row["cells"]]
    assert row["cost"] == pytest.approx(row["gpu_hours"] * 3600)
    assert row["gpu_hours"] == pytest.approx(2 * row["seconds"] / 3600)
    assert told["best"] == 0
    assert told["counts"] == {"finished": 18}
    assert told["objective"] == {"metric": "eval_loss", "mode": "min"}


def test_what_became_of_cells(swept: Make) -> None:
    """Every status has its cause. A running cell's figures come from its run; the best cell is a finished one. A cell that an
    earlier driver started and did not end is lost; without a driver, so is every started cell that has not ended."""
    made = swept("array: {parameters: {lr: [1, 2, 3, 4, 5, 6, 7]}}\nlimits: {cost_per_gpu_hour: 1}")
    made.start(5)
    lease = DriverLease(RunDir(made.folder.uri))
    made.finish(0, 2.5)
    for cell in range(1, 5):
        made.start(cell)
    made.end(1, "stopped", because="at 100,000 tokens the 3rd of 4", figures={"eval_loss": 2.0, "tokens": 500})
    made.end(2, "failed", cause="rank 1: killed by SIGKILL", final=True)
    made.end(3, "paused", because="interrupted by SIGINT")
    train(made.folder.run(made.cells[4].id), made.cells[4], [4.0] * 10, 1.5, "running")
    train(made.folder.run(made.cells[5].id), made.cells[5], [4.0] * 10, 1.5, "running")
    told = strict(tell(made.folder))
    lease.release()
    assert [(row["status"], row["cause"], row["objective"]) for row in told["points"]] == [
        ("finished", None, 2.5),
        ("stopped", "at 100,000 tokens the 3rd of 4", 2.0),
        ("failed", "rank 1: killed by SIGKILL", None),
        ("paused", "interrupted by SIGINT", None),
        ("running", None, 1.5),
        ("lost", "its driver died; the same command resumes it", 1.5),
        ("waiting", None, None),
    ]
    assert told["best"] == 0
    assert told["points"][4]["tokens"] == 1000
    assert told["counts"] == dict.fromkeys(("running", "lost", "waiting", "paused", "failed", "stopped", "finished"), 1)
    after = tell(made.folder)
    assert after["counts"] == {"lost": 2, "waiting": 1, "paused": 1, "failed": 1, "stopped": 1, "finished": 1}
    assert b"2 lost" in render(after, [])


def test_a_point_of_unlike_cells(swept: Make) -> None:
    """While a seed is missing the point is not finished, and its objective is the mean of the finished seeds."""
    made = swept("array: {parameters: {lr: [1]}, seeds: 3}")
    made.finish(0, 2.0)
    made.finish(1, 3.0)
    made.start(2)
    made.end(2, "failed", cause="x", final=False, figures={"eval_loss": 9.0})
    told = tell(made.folder)
    assert [(r["status"], r["cause"], r["objective"], r["failures"]) for r in told["points"]] == [
        ("waiting", "x", 2.5, 1)
    ]
    assert told["best"] is None


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.integers(1, 8), st.floats(0, 8), st.floats(0, 1e4)), min_size=1, max_size=6
    )
)
def test_what_a_cell_cost(stretches: list[tuple[float, int, float, float]]) -> None:
    """Seconds and GPU-hours are the sums over all its stretches, without the pauses between."""
    state, at = CellState(), 0.0
    for length, workers, gpus, pause in stretches:
        state.stretches.append(Stretch(at, workers, gpus, at + length))
        at += length + pause
    seconds, gpu_hours = spent(state, SweepDir("/nowhere").run("c"), at)
    assert seconds == pytest.approx(sum(s[0] for s in stretches), abs=1e-6)
    assert gpu_hours == pytest.approx(sum(s[0] * s[2] for s in stretches) / 3600, abs=1e-6)


def test_a_killed_driver_is_paid_up_to_its_last_sign(swept: Make) -> None:
    """A stretch without an end lasts until its run's last event or heartbeat, but not past the begin of the next stretch."""
    made = swept("array: {parameters: {lr: [1]}}")
    run = made.folder.run("r")
    train(run, made.cells[0], [4.0] * 3, 2.0, "running")
    begin = time.time() - 1000
    state = CellState(stretches=[Stretch(begin, 2, 2.0)])
    seconds, gpu_hours = spent(state, run, begin + 5000)
    assert 999 < seconds < 1100
    assert gpu_hours == pytest.approx(seconds * 2 / 3600)
    state.stretches = [Stretch(begin, 2, 2.0), Stretch(begin + 10, 2, 2.0, begin + 30)]
    assert spent(state, run, begin + 5000)[0] == pytest.approx(20)


def test_a_metric_that_is_never_reported(swept: Make) -> None:
    """It is one clear error that names the available metrics; before any cell has finished there is no error."""
    made = swept(GRID.format(1))
    assert tell(made.folder)["analysis"]["words"] == ["no cell has finished yet"]
    made.finish(0, None)
    with pytest.raises(UsageError, match="none of its 1 finished cells has reported eval_loss") as caught:
        tell(made.folder)
    assert "loss, tokens_per_second" in caught.value.hint
    assert caught.value.exit_code == 2
    made.finish(1, 2.0)
    assert tell(made.folder)["best"] == 1


def test_words_of_a_grid(swept: Make) -> None:
    """The best with its interval, the points within its noise, the edge with the value to try next, the optimum for each batch
    size."""
    made = swept(GRID.format(3))
    for i, cell in enumerate(made.cells):
        lr, batch = cell.job.optim.lr, cell.job.train.global_batch
        optimum = 1e-3 * (batch / 16) ** 0.5
        made.finish(i, 2 + 0.1 * math.log(lr / optimum) ** 2 + 0.02 * (cell.seed - 18) + 0.001 * (batch - 16))
    told = strict(tell(made.folder))
    words = told["analysis"]["words"]
    assert words[0].startswith(
        "best: learning_rate 0.001, batch_size 16: eval_loss 2.0000 (95% interval 1.9503 to 2.0497 over 3"
    )
    assert words[1] == (
        "the base's own values (learning_rate 0.001, batch_size 32): eval_loss 2.0280; the best is 0.0280 lower, within the noise"
    )
    assert words[2] == "inside the tried range: learning_rate 0.001 (0.0001 to 0.01)"
    assert words[3] == "within the noise of the best: learning_rate 0.001, batch_size 32"
    assert words[4] == "batch_size 16 is the lowest value that was tried: try 8 too"
    assert [(o["at"], o["inside"]) for o in told["analysis"]["optima"]] == [
        ({"train.global_batch": 16}, True),
        ({"train.global_batch": 32}, True),
    ]
    for one, true in zip(told["analysis"]["optima"], (1e-3, 1e-3 * 2**0.5), strict=True):
        assert one["low"] < true < one["high"]
        assert one["optimum"] == pytest.approx(true, rel=0.02)
    assert words[5].startswith("optimum of learning_rate at batch_size 16: 0.001 (95% interval 0.000")
    assert len(words) == 7


@pytest.mark.parametrize(
    ("scale", "measured", "shown", "far"),
    [
        (40.0, 20, "40 sequences", False),
        (3.0, 20, "3 sequences", True),
        (3.0, 19, "3 sequences", False),
        (0.0, 20, "less than 1 sequence", True),
    ],
)
def test_a_batch_far_beyond_the_noise_scale(swept: Make, scale: float, measured: int, shown: str, far: bool) -> None:
    """The conclusions show the best point's batch with the noise scale, and report one that is far larger, as in a run: only
    after 20 measurements, one every ten steps. The scale shown is never less than one sequence."""
    made = swept(GRID.format(1))
    for i in range(6):
        made.finish(i, 2.0 + i, grad_noise_scale=scale, tokens=measured * 10 * 16 * 128)
    (line,) = [line for line in tell(made.folder)["analysis"]["words"] if "noise scale" in line]
    assert line.startswith(f"gradient noise scale of the best: {shown}, its global batch has 16")
    assert ("far beyond" in line) is far


def test_one_seed_says_that_noise_is_unknown(swept: Make) -> None:
    """No point is reported as within the noise of the best."""
    made = swept(GRID.format(1))
    for i in range(6):
        made.finish(i, 2.0 + 0.1 * i)
    told = tell(made.folder)
    assert (told["analysis"]["as_good"], told["analysis"]["noise_known"]) == ([], False)
    assert any("one seed per point" in line for line in told["analysis"]["words"])


@pytest.mark.parametrize(
    ("rates", "best", "said"),
    [
        ("[3e-4, 1e-3, 3e-3]", 3e-3, "(learning_rate 0.001): eval_loss 2.2000; the best is 0.2000 lower"),
        ("[3e-4, 1e-3, 3e-3]", 1e-3, "the base's own values (learning_rate 0.001) are the best"),
        ("[1e-5, 5e-5, 1e-4]", 5e-5, "learning_rate 0.001 of the base lies outside the tried range (1e-05 to 0.0001)"),
        ("[5e-4, 2e-3, 8e-3]", 2e-3, ""),
    ],
)
def test_the_base_s_own_values(swept: Make, rates: str, best: float, said: str) -> None:
    """The gain of the sweep: the base's point beside the best; or, before and after, that the base lies outside the tried range.
    A best value between others is reported as inside.
    """
    made = swept(f"array: {{parameters: {{lr: {rates}}}}}")
    for i, cell in enumerate(made.cells):
        made.finish(i, 2.0 if cell.job.optim.lr == best else 2.2)
    told = strict(tell(made.folder))
    words = told["analysis"]["words"]
    assert words[0].startswith(f"best: learning_rate {best:g}")
    assert said in words[1] if said else not any("the base" in line for line in words)
    same = [i for i, cell in enumerate(made.cells) if cell.job.optim.lr == 1e-3]
    assert told["analysis"]["base"] == (same[0] if same else None)
    inner = best not in (3e-3, 1e-5)
    assert told["analysis"]["inside"] == (["optim.lr"] if inner else [])
    assert any(line.startswith(f"inside the tried range: learning_rate {best:g} (") for line in words) == inner
    ahead = forecast.tell(made.sweep, made.cells, [])["notes"]
    assert any("lies outside" in note for note in ahead) == ("lies outside" in said)
    statuses = [line.split("|")[-3].strip() for line in tables.markdown(told).splitlines()[2:5]]
    assert statuses[0] == ("finished (best, base)" if best == 1e-3 else "finished (best)")
    assert ("finished (base)" in statuses) == (bool(same) and best != 1e-3)
    page = render(told, []).decode()
    assert (',"base",false]' in page or ',"base"]' in page) == bool(same), "a mark of a curve, or a named cell of a map"


def test_a_natural_end_is_no_edge(swept: Make) -> None:
    """A dropout of 0 is best: there is no smaller value. For a drawn range, its outer tenth is the edge."""
    made = swept("array: {parameters: {dropout: [0, 0.1, 0.2]}}")
    for i in range(3):
        made.finish(i, 2.0 + i)
    assert tell(made.folder)["analysis"]["edges"] == []
    made = swept("array: {type: random, samples: 40, parameters: {lr: {log_uniform: [1e-4, 1e-2]}}}", "r")
    for i, cell in enumerate(made.cells):
        made.finish(i, -cell.job.optim.lr)
    (edge,) = tell(made.folder)["analysis"]["edges"]
    assert (edge["field"], edge["side"], edge["spacing"], edge["next"]) == ("optim.lr", "highest", "log", 0.0316)


def test_pbt_has_neither_edges_nor_optima(swept: Make) -> None:
    """The cells' values change during training; the lineage is in the row."""
    made = swept("pbt.yaml")
    for i in range(8):
        made.start(i)
    exploit = {"source": made.cells[0].id, "step": 20, "tokens": 81920, "changes": {"optim.lr": [0.001, 0.0008]}}
    made.end(3, "exploited", **exploit)
    for i in range(8):
        made.finish(i, 2.0 + abs(i - 3))
    told = strict(tell(made.folder))
    assert told["best"] == 3
    assert told["analysis"]["edges"] == []
    assert "under pbt" in told["analysis"]["optima_refused"]
    (lineage,) = told["points"][3]["lineage"]
    assert [{k: v for k, v in step.items() if k != "at"} for step in lineage] == [exploit]
    train(made.folder.run(made.cells[3].id), made.cells[3], [2.0], 2.0)
    _, lines = best_job(made.folder, told)
    assert lines[-1] == f"At step 20 it continued from {made.cells[0].id}'s checkpoint: optim.lr 0.001 -> 0.0008."


def test_tables_say_the_same(swept: Make) -> None:
    """CSV has exact values in order; Markdown and the terminal have the best point first, and the causes of failures."""
    made = swept(GRID.format(1))
    for i in range(5):
        made.finish(i, 2.0 - 0.1 * i)
    made.start(5)
    made.end(5, "failed", cause="rank 0: out of memory", final=True)
    told = tell(made.folder)
    rows = list(csv.DictReader(io.StringIO(tables.as_csv(told))))
    assert [float(r["optim.lr"]) for r in rows] == [1e-4, 1e-4, 1e-3, 1e-3, 1e-2, 1e-2]
    assert [r["objective"] and float(r["objective"]) for r in rows] == [2.0 - 0.1 * i for i in range(5)] + [""]
    assert json.loads(rows[5]["cells"]) == [made.cells[5].id]
    page = tables.markdown(told).splitlines()
    assert page[0].startswith("| learning_rate | batch_size | eval_loss |")
    assert page[2].startswith("| 0.01 | 16 | 1.6000 |")
    assert "finished (best)" in page[2]
    assert page[7].startswith("| 0.01 | 32 | - |")
    assert page[9].startswith("- best: learning_rate 0.01, batch_size 16")
    sink = io.StringIO()
    tables.results(told, Console(file=sink, width=40))
    shown = sink.getvalue().splitlines()
    assert shown[1].split()[:3] == ["0.01", "16", "1.6000"]
    assert f"{made.cells[5].id}: failed: rank 0: out of memory" in shown


def test_parquet_has_a_column_a_parameter(swept: Make) -> None:
    """Numbers are numbers, a column with several types has JSON, and each point is one row."""
    text = "array: {type: list, parameters: [{lr: 1e-3, optim.schedule: wsd}, {lr: 2, optim.schedule: {name: cosine, floor: 0}}]}"
    made = swept(text)
    made.finish(0, 2.0)
    made.finish(1, 1.0)
    write_parquet(made.folder, tell(made.folder))
    table = pq.read_table(Path(made.folder.uri) / "results.parquet")
    assert table["optim.lr"].to_pylist() == [1e-3, 2.0]
    assert [json.loads(v) for v in table["optim.schedule"].to_pylist()] == ["wsd", {"name": "cosine", "floor": 0}]
    assert table["objective"].to_pylist() == [2.0, 1.0]
    assert table["cells"].to_pylist() == [[c.id] for c in made.cells]


def test_the_best_cell_s_job(swept: Make, tmp_path: Path) -> None:
    """It is the job of the best seed of the best point, with a name of its own, and loads as a job."""
    made = swept("array: {parameters: {lr: [1e-3, 2e-3]}, seeds: 2}")
    with pytest.raises(UsageError, match=r"no cell has finished \(4 waiting\)"):
        best_job(made.folder, tell(made.folder))
    for i, value in enumerate((3.0, 2.0, 3.1, 2.2)):
        made.finish(i, value)
    with pytest.raises(StorageError, match="does not exist"):
        best_job(made.folder, tell(made.folder))
    train(made.folder.run(made.cells[1].id), made.cells[1], [2.0], 2.0)
    job, lines = best_job(made.folder, tell(made.folder))
    path = tmp_path / "best.yaml"
    path.write_text("".join(f"# {line}\n" for line in lines) + dump(job))
    loaded = load(path)
    assert (loaded.name, loaded.optim.lr, loaded.train.seed) == ("s-best", 2e-3, 17)
    assert loaded.model_copy(update={"name": made.cells[1].id}) == made.cells[1].spec
    assert lines[0] == f"The best cell of sweep s: {made.cells[1].id}."


def test_the_forecast(swept: Make, tmp_path: Path) -> None:
    """Hours and cost are measured in the base's run, if there is one, then in the sweep's own cells; else they are marked as
    estimates, or missing."""
    made = swept("array: {parameters: {width: [128, 64], batch_size: [32, 64]}, concurrent: 1}\n"
                 "limits: {gpu_hours: 0.1, hours: 100, cost_per_gpu_hour: 2}")  # fmt: skip
    storage = Storage(tmp_path / "storage")

    def tell_it(estimate_speed: forecast.EstimateSpeed | None = None) -> dict[str, Any]:
        known = forecast.paces(storage, made.sweep, made.cells)
        return dict(strict(forecast.tell(made.sweep, made.cells, known, estimate_speed)))

    def estimate_speed(job: JobSpec) -> forecast.Pace | str:
        return "its model is new" if job.train.global_batch == 64 else forecast.Pace("any", 8192.0, "H100 at 40%")

    told = tell_it()
    assert [(cell["hours"], cell["by"]) for cell in told["cells"]] == [(None, None)] * 4
    assert told["notes"] == [
        "time: unknown until a cell or the base, quickstart, has run in the same storage; then from its tokens/s",
        "one cell after another",
    ]
    assert (told["totals"]["cells"], told["totals"]["tokens"], told["over"]) == (4, 4 * 819200, [])
    base = made.sweep.base
    run = SweepDir(storage.uri).storage.at(base.name)
    train(RunDir(run.uri), made.sweep.cell({}, 0, 0), [4.0] * 5, 2.0)
    told = tell_it()
    assert [cell["hours"] for cell in told["cells"]] == [pytest.approx(819.2 / 3600)] * 2 + [None] * 2
    assert told["totals"]["gpu_hours"] is None
    told = tell_it(estimate_speed)
    assert [cell["hours"] for cell in told["cells"]] == [pytest.approx(819.2 / 3600)] * 2 + [
        pytest.approx(100 / 3600),
        None,
    ]
    measured = f"measured in run {base.name}"
    assert [cell["by"] for cell in told["cells"]] == [
        measured, measured, "reckoned for H100 at 40%", "unknown: its model is new"
    ]  # fmt: skip
    assert told["notes"][1:3] == [
        "time marked ~, of 1 of 4 cells: estimated as in raydist plan, for H100 at 40%, not measured, without the start of a "
        "cell",
        "time is not estimated: its model is new",
    ]
    sink = io.StringIO()
    tables.forecast(told, Console(file=sink, width=40))
    assert [line.split()[7] for line in sink.getvalue().splitlines()[1:5]] == ["13:39", "13:39", "~1:40", "-"]
    made.finish(0, 2.0, tokens_per_second=2000.0)
    made.finish(2, 2.0, tokens_per_second=4000.0)
    told = tell_it()
    each = [409.6 / 3600] * 2 + [204.8 / 3600] * 2
    assert [cell["hours"] for cell in told["cells"]] == pytest.approx(each)
    assert told["totals"]["gpu_hours"] == pytest.approx(2 * sum(each))
    assert told["totals"]["cost"] == pytest.approx(4 * sum(each))
    assert told["totals"]["hours"] == pytest.approx(sum(each))
    assert told["over"] == ["limits.gpu_hours: 0.1 will end the sweep before its last cell: it takes about 0.683"]


def test_the_forecast_of_a_place(swept: Make, tmp_path: Path) -> None:
    """The real concurrency there: as many cells at once as fit, no GPU-hours and no cost without a GPU; or why none can run."""
    made = swept("array: {parameters: {batch_size: [16, 32, 64]}, concurrent: 3}\n"
                 "limits: {gpu_hours: 10, hours: 2, cost_per_gpu_hour: 2}")  # fmt: skip
    known = [forecast.Pace(forecast.kind(made.sweep.base), 4096.0, "run quickstart")]
    jobs = [cell.job for cell in made.cells]

    def tell_it(*nodes: dict[str, float]) -> tuple[dict[str, Any], list[str]]:
        listed = tuple({"Resources": node, "NodeManagerAddress": ""} for node in nodes)
        ground = Ground("this machine", listed, {k: sum(n.get(k, 0.0) for n in nodes) for k in ("CPU", "GPU")})
        told = dict(strict(forecast.tell(made.sweep, made.cells, known, None, ground.place(jobs, 3))))
        sink = io.StringIO()
        tables.forecast(told, Console(file=sink, width=200))
        return told, sink.getvalue().splitlines()

    told, shown = tell_it({"CPU": 2.0})
    assert told["where"] == "this machine (2 CPUs, no GPU)"
    assert (told["totals"]["at_once"], told["totals"]["gpu_hours"], told["totals"]["cost"]) == (1, 0.0, 0.0)
    assert shown[0].split()[-2:] == ["tokens", "time"]
    assert shown[1].split()[-1] == "3:20"
    assert shown[4:] == [
        "3 cells, 3 points; 2,457,600 tokens; about 10:00 wall time; it pauses after 2:00:00 (limits.hours)",
        "time: by 4,096 tokens/s of run quickstart, without the start of a cell",
        "on this machine (2 CPUs, no GPU): one cell after another; array.concurrent is 3, but there is no room for more",
    ]
    told, shown = tell_it({"CPU": 4.0})
    assert "about 6:40 wall time" in shown[4]
    assert shown[-1].startswith("on this machine (4 CPUs, no GPU): 2 cells at once; array.concurrent is 3")
    told, shown = tell_it({"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0})
    assert shown[0].split()[-3:] == ["time", "GPU-hours", "cost"]
    assert shown[-1] == "on this machine (32 CPUs, 8 GPUs, 2 nodes): 3 cells at once"
    assert "GPU-hours 0.333 of 10; cost 0.667" in shown[4]
    told, shown = tell_it({"CPU": 1.0})
    assert (told["totals"]["at_once"], told["totals"]["hours"]) == (None, None)
    assert shown[-1] == (
        "it cannot run on this machine (1 CPU, no GPU): a trial asks for 2 workers of 1 CPU, the cluster has 1 CPU on 1 node: "
        "1 would fit; choose another cluster with --address"
    )


def test_ten_thousand_cells_are_read_from_the_log_alone(swept: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of an ended cell is opened: a sweep of any size needs only a few files."""
    made = swept("array: {type: random, samples: 300, parameters: {lr: {log_uniform: [1e-4, 1e-2]}}, seeds: 2}")
    for i in range(len(made.cells)):
        made.log.event("started", made.cells[i].id, workers=2, gpus=0.0)
        made.log.event("finished", made.cells[i].id, figures={"eval_loss": 2.0 + i % 7, "tokens": 10})
    made.log.flush()
    opened: list[str] = []
    read = Storage.read
    monkeypatch.setattr(Storage, "read", lambda self, name: opened.append(f"{self.uri}/{name}") or read(self, name))
    told = tell(made.folder)
    assert told["counts"] == {"finished": len(made.cells)}
    assert {name.removeprefix(made.folder.uri) for name in opened} == {
        "/sweep.yaml", "/base.yaml", "/cells.jsonl", "/events/000001.jsonl", "/events/000002.jsonl",
    }  # fmt: skip
