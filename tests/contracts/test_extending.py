"""The examples of docs/extending.md: complete, one for each kind, and tested against the contract of their kind."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from torch import nn
from typer.testing import CliRunner

from raydist import registry
from raydist.cli.main import app
from raydist.data import prepare, tokenizers
from raydist.data.dataset import TokenDataset
from raydist.diagnosis import Window
from raydist.diagnosis._window import BIN_S, Store
from raydist.errors import SpecError
from raydist.extension_plans import optimizer_plan, strategy_plan
from raydist.observe.exporters import resolve
from raydist.planner.shares import planned
from raydist.run.directory import RunDir
from raydist.spec import load, parse
from raydist.spec.load import read_yaml
from raydist.spec.running import HookSpec
from raydist.spec.sweep import load_sweep
from raydist.worker import parallel
from raydist.worker.distributed import Rank
from raydist.worker.hooks import BaseHook, HookFacts
from raydist.worker.run_hooks import RunHooks
from tests.contracts import (
    test_compressors,
    test_exchanges,
    test_exporters,
    test_losses,
    test_models,
    test_optimizers,
    test_schedulers,
    test_strategies,
)
from tests.training import MODEL, job, run

PAGE = next((Path(__file__).parents[2] / "docs").rglob("extending.md"))
FILES = {
    name: text for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
}
"""File name -> its text, from the page's code blocks."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the page's files, on the import path."""
    made = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (made / name).write_text(text)
    sys.path.insert(0, str(made))
    yield made
    sys.path.remove(str(made))
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


def named(kind: str) -> str:
    """The example of a kind, as a job names it."""
    stem = {"parallel": "strategy", "diagnosis": "rule"}.get(kind, kind)
    return f"my_{stem}:{registry.FOLDERS[kind][1]}"


def test_there_is_an_example_of_each_kind() -> None:
    """Each kind in the registry, and besides these only a job and a sweep; every Python block is tested."""
    assert {f"{named(kind).partition(':')[0]}.py" for kind in registry.FOLDERS} | {
        "job.yaml",
        "sweep.yaml",
    } == FILES.keys()
    assert PAGE.read_text().count("```python") + PAGE.read_text().count("```yaml") == len(FILES)
    for kind in registry.FOLDERS:
        assert registry.load(kind, named(kind)) is not None


def test_the_job_is_valid(folder: Path) -> None:
    """It loads without importing torch, names each example, and its strategy can be planned."""
    text = FILES["job.yaml"]
    spec = load(folder / "job.yaml")
    assert all(named(kind) in text for kind in registry.FOLDERS if kind not in ("scheduler", "diagnosis"))
    assert named("parallel") in planned(spec)


def test_a_strategy_gets_the_defaults_of_what_it_leaves_out() -> None:
    """The example is not derived from `ParallelStrategy`, and has neither `parts`, `passes`, `messages` nor `reduces_together`."""
    mesh: Any = None
    made = parallel.build(parse(yaml.safe_load(FILES["job.yaml"]), source="job.yaml"), mesh)
    assert not hasattr(type(made), "passes")
    assert (made.parts, made.messages(), made.reducers(), made.reduces_together()) == (None, [], [], 1)
    seen: list[int] = []
    work: Any = SimpleNamespace(
        trains=True,
        around=lambda index: nullcontext(),
        forward=lambda module, index, batch: batch,
        backward=lambda index, loss: seen.append(loss),
    )
    made.module = nn.Identity()
    made.passes([7, 8], work)  # type: ignore[list-item]
    assert seen == [7, 8]


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("model.options.windw=3", 'model.options.windw: unknown field; did you mean "window"?'),
        ("model.options.window=9", "model.options.window: 9 is more than context; try 8"),
        ("parallel.options.flt=1", 'parallel.options.flt: unknown field; did you mean "flat"?'),
        ("optim.options.beta=2", "optim.options.beta: 2: input should be less than 1; see docs/extending.md"),
        ("train.loss.options.smoothin=0", 'train.loss.options.smoothin: unknown field; did you mean "smoothing"?'),
    ],
)
def test_options_are_checked(folder: Path, field: str, line: str) -> None:
    """For an unknown option the error has a suggestion; a value out of range and incompatible values are named."""
    with pytest.raises(SpecError) as caught:
        load(folder / "job.yaml", [field])
    assert caught.value.message == f"--set {field.partition('=')[0]}: {line}"


def test_options_of_a_list_are_checked() -> None:
    """The error names an exporter's option with its index in the list."""
    tree = yaml.safe_load(FILES["job.yaml"])
    tree["observe"]["exporters"][0]["options"] = {"pth": "x"}
    with pytest.raises(SpecError, match=r'observe\.exporters\[0\]\.options\.pth: unknown field; did you mean "path"\?'):
        parse(tree)


def test_the_schema_has_the_options(folder: Path) -> None:
    """`raydist schema job.yaml` includes them, and the schema accepts the job."""
    told = CliRunner().invoke(app, ["schema", str(folder / "job.yaml")])
    made = json.loads(told.stdout)
    assert made["$defs"]["ModelMy_modelOptions"]["properties"]["window"]["default"] == 4
    tree = read_yaml(folder / "job.yaml")
    jsonschema.validate(tree, made)
    tree["optim"]["options"] = {"bta": 0.95}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, made)


BUILT_IN = """
import json, sys
import raydist
from raydist import registry
from raydist.cli.schema import job_schema, sweep_schema
from raydist.diagnosis import Diagnosis
from raydist.extension_plans import strategies
from raydist.spec import load
from raydist.spec.sweep import load_sweep

assert raydist.__file__.startswith(sys.path[0])
settings = load_sweep("sweep.yaml").spec.scheduler.settings()
Diagnosis()
told = [load("job.yaml").optim.options, settings, "mine" in strategies(), sorted(job_schema()["$defs"]), sweep_schema()]
assert "torch" not in sys.modules
assert all(registry.load(kind, "mine") for kind in registry.FOLDERS)
print(json.dumps(told))
"""


def test_a_file_in_its_folder_is_all_it_takes(tmp_path: Path) -> None:
    """In a copy of the package with only the examples added as files of their folders: jobs and sweeps accept their names and
    options; the planner, the schema and the diagnosis know them."""
    root = Path(registry.__file__).parent
    shutil.copytree(root, tmp_path / "raydist", ignore=shutil.ignore_patterns("__pycache__"))
    for kind, (where, _) in registry.FOLDERS.items():
        text = FILES[f"{named(kind).partition(':')[0]}.py"]
        (tmp_path / "raydist" / where / "mine.py").write_text(text)
    (tmp_path / "job.yaml").write_text(re.sub(r'"my_\w+:\w+"', "mine", FILES["job.yaml"]))
    sweep = FILES["sweep.yaml"].replace(
        '"my_scheduler:build", options: {at: 1e4, worst: 5.0}', "mine, at: 1e4, worst: 5.0"
    )
    (tmp_path / "sweep.yaml").write_text(sweep)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{BUILT_IN}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    options, settings, planned_too, definitions, of_sweeps = json.loads(done.stdout)
    assert (options, settings, planned_too) == ({"beta": 0.95}, {"at": 10_000, "worst": 5.0}, True)
    assert {
        "CompressorMineOptions",
        "ModelMineOptions",
        "LossMineOptions",
        "OptimizerMineOptions",
        "ParallelMineOptions",
        "ExporterMineOptions",
    } <= {*definitions}
    assert "worst" in of_sweeps["$defs"]["SchedulerSpec"]["properties"]


def test_the_model_keeps_its_contract() -> None:
    """It passes the tests of the built-in models."""
    name = named("model")
    test_models.test_logits_of_the_vocabulary(name)
    test_models.test_the_seed_decides_the_weights(name)
    test_models.test_import_draws_nothing(name)
    test_models.test_gradients_reach_every_parameter(name)
    test_models.test_causal(name)
    test_models.test_packed_documents_do_not_see_each_other(name)
    test_models.test_evaluation_is_deterministic_and_draws_nothing(name)


def trained_with(rank: Rank, folder: str, options: dict[str, Any]) -> Any:
    """Five steps with the example strategy."""
    sys.path.insert(0, folder)
    try:
        spec = job("ddp", parallel={"strategy": named("parallel"), "options": options})
        return test_strategies.train(rank, spec, 7, 2)
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("flat", [True, False])
def test_the_strategy_computes_as_one_process(ranks: Any, folder: Path, flat: bool) -> None:
    """Losses, gradients and weights on 3 ranks, with an uneven batch."""
    assert strategy_plan(named("parallel")) is not None
    for got in run(ranks, trained_with, 3, str(folder), {"flat": flat}):
        test_strategies.compare(got, test_strategies.reference(7, True, "fp32"))


def exchanged_with(rank: Rank, name: str, folder: str) -> Any:
    """The contract's rows, by the example exchange."""
    sys.path.insert(0, folder)
    try:
        return test_exchanges.exchanged(rank, name)
    finally:
        sys.path.remove(folder)


def test_the_exchange_keeps_its_contract(ranks: Any, folder: Path) -> None:
    """It sends half of the bytes, and its numbers are those of bf16, which rounds each row four times by up to 0.4%."""
    half = test_exchanges.check(ranks, named("exchange"), 2e-2, exchanged_with, str(folder))
    assert [2 * sent for sent in half] == test_exchanges.check(ranks, "all_to_all")


def compressed_with(rank: Rank, name: str, folder: str) -> Any:
    """The contract's steps, with the example compressor, under the example strategy."""
    sys.path.insert(0, folder)
    try:
        return test_compressors.stepped(rank, "ddp", [name], parallel={"strategy": named("parallel")})
    finally:
        sys.path.remove(folder)


def test_the_compressor_keeps_its_contract(ranks: Any, folder: Path) -> None:
    """It passes the tests of the built-in compressors, under the example strategy."""
    name = named("compressor")
    test_compressors.check(name, "ddp", 2, run(ranks, compressed_with, 2, name, str(folder)))
    for bad in (math.inf, math.nan):
        test_compressors.test_what_is_not_finite_stays_so(name, bad)


def test_the_optimizer_keeps_its_contract() -> None:
    """It passes the tests of the built-in optimizers."""
    name = named("optimizer")
    assert optimizer_plan(name) is not None
    test_optimizers.test_groups_hold_every_parameter(name)
    test_optimizers.test_the_plan_counts_its_state(name)
    test_optimizers.test_a_loaded_state_continues(name)


def test_the_loss_keeps_its_contract() -> None:
    """It passes the tests of the built-in losses."""
    name = named("loss")
    test_losses.test_it_is_a_sum(name)
    test_losses.test_masked_targets_do_not_count(name)


def test_the_tokenizer_prepares_a_corpus(tmp_path: Path) -> None:
    """A dataset is prepared with it, and decodes to its text."""
    (tmp_path / "a.txt").write_text("größe\n")
    prepare.prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=named("tokenizer"), eval_fraction=0.0)
    made = TokenDataset(tmp_path / "out").tokenizer
    assert type(made).__name__ == "Tokenizer"
    assert made.decode(made.encode(["größe"])[0]) == "größe"
    assert tokenizers.load(named("tokenizer")).vocab_size == 17


def test_the_scheduler_keeps_its_contract(folder: Path) -> None:
    """The sweep loads, an option is checked, and the rule stops a trial whose loss exceeds its bound."""
    sweep = load_sweep(folder / "sweep.yaml")
    made = test_schedulers.rule({"name": named("scheduler"), "options": sweep.spec.scheduler.options})
    assert [made.report("a", 10_000, -4.0), made.report("b", 9_999, -6.0), made.report("b", 10_000, -6.0)] == [
        test_schedulers.GO,
        test_schedulers.GO,
        test_schedulers.STOP,
    ]
    (folder / "wrong.yaml").write_text(FILES["sweep.yaml"].replace("worst: 5.0", "worse: 5.0"))
    with pytest.raises(SpecError) as caught:
        load_sweep(folder / "wrong.yaml")
    assert 'scheduler.options.worse: unknown field; did you mean "worst"?' in caught.value.message


def test_the_exporter_keeps_its_contract(tmp_path: Path) -> None:
    """It passes the tests of the built-in exporters; and its file has a line for each step."""
    name = named("exporter")
    path = tmp_path / "losses.csv"
    test_exporters.test_a_run_that_is_gone_on_with(tmp_path, lambda name: {"path": str(path)}, name)
    test_exporters.test_an_unknown_option_is_refused(name)
    test_exporters.test_has_the_contract_s_methods(name)
    assert resolve([{"name": name, "options": {}}], RunDir(tmp_path / "run"))[0]["options"]["path"].endswith(
        "losses.csv"
    )
    assert path.read_text().splitlines()[:2] == ["3,nan", "4,0.25"]


def test_the_hook_keeps_its_contract(tmp_path: Path) -> None:
    """It has the contract's methods, and notes the evaluation that it waits for."""
    kind = registry.load("hook", named("hook"))
    assert issubclass(kind, BaseHook)
    facts = HookFacts(RunDir(tmp_path / "run"), job("ddp"), {"below": 2.0}, 0, 1, 1, 0, nn.Linear(1, 1))
    hooks = RunHooks([HookSpec(name=named("hook"), options={"below": 2.0})], lambda options: facts, True, print)
    hooks.call("on_eval", 3, 2.5)
    assert not facts.run.storage.exists("reached.txt")
    hooks.call("on_eval", 6, 1.5)
    assert facts.run.storage.read("reached.txt") == b"loss 1.5000 at step 6\n"


def test_the_rule_keeps_its_contract() -> None:
    """It names the rank that holds more than twice the median, and finds nothing if all are equal."""
    rule = importlib.import_module("my_rule")
    assert all(getattr(rule, name) for name in ("CAUSE", "LOOKS", "THRESHOLDS"))
    for most, told in ((1, []), (3, [(1, 3 * 2.0**30)])):
        store = Store(["at", *rule.COLUMNS])
        for at in range(60):
            for rank in range(3):
                held = 2**30 * (most if rank == 1 else 1)
                store.add(rank, {"at": float(at), "rss_bytes": held, "rank": rank, "host": "h", "node": "10.0.0.1"})
        found = list(rule.check(Window(int(59 // BIN_S), stores={"rank": store})))
        assert [(one.rank, one.figures["rss_bytes"]) for one in found] == told


def test_a_model_with_the_loss_and_the_optimizer_learns(ranks: Any, folder: Path) -> None:
    """All three together, on one process: the loss falls."""
    train = {"loss": {"name": named("loss"), "options": {}}}
    optim = {"name": named("optimizer"), "lr": 1e-2}
    spec = job("ddp", {**MODEL, "name": named("model")}, train, optim=optim)
    reports = run(ranks, test_strategies.train, 1, spec, 6, 2)[0][0]
    assert reports[-1].loss < reports[0].loss
