"""The parts of an extension's file that the driver reads without torch: options, plans and checks; and jobs keep their hashes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raydist import registry
from raydist.cli.schema import job_schema
from raydist.errors import ExtensionNotFound, SpecError
from raydist.extension_plans import optimizer_plan, strategy_plan
from raydist.spec import dump, load, spec_hash
from raydist.spec.validate import options_model

JOBS = Path(__file__).parents[2] / "jobs"
HASHES = {
    "deepseek_7b_zero3.yaml": "905a7f439ce8f18f46a4749a6a3089a8068e988bb07d001f114824c35c868ef3",
    "python-10min.yaml": "419409b6dd9a0bbab82aea5eeab7c728447cfb0ebb08580d2d96bf7ce0776bbc",
    "quickstart.yaml": "82a5be9f74354df66064264f71e73bfc0c790f417b179d9ef95a9907269998a6",
}
"""Hashes computed before options existed; existing run folders contain them."""


def test_a_driver_reads_all_of_them_without_torch() -> None:
    """Options, PLAN, check_spec, COPIES and VARIANTS of all built-in extensions; neither torch nor ray is imported."""
    script = (
        "import sys\nfrom raydist import registry\n"
        "for kind in registry.FOLDERS:\n"
        "    for name in registry.names(kind):\n"
        "        for what in ('Options', 'PLAN', 'check_spec', 'COPIES', 'VARIANTS', 'HUGGINGFACE', 'check_tensor'):\n"
        "            registry.described(kind, name, what)\n"
        "from raydist.spec import load\n"
        f"load({str(JOBS / 'quickstart.yaml')!r})\n"
        "heavy = {'torch', 'ray', 'tensorflow', 'mlflow', 'wandb', 'tokenizers'}\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & heavy))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in registry.FOLDERS for n in registry.names(k)])
def test_options_have_descriptions(kind: str, name: str) -> None:
    """Each option of a file has a description; each strategy and optimizer has a PLAN; `raydist schema` has the options of a
    job's extensions."""
    options = options_model(kind, name)
    for field, info in options.model_fields.items() if options is not None else ():
        assert info.description, field
    assert kind != "parallel" or strategy_plan(name) is not None
    assert kind != "optimizer" or optimizer_plan(name) is not None
    if options is not None and kind not in ("scheduler", "tokenizer", "diagnosis"):
        assert f"{kind.capitalize()}{name.capitalize()}Options" in job_schema()["$defs"]


@pytest.mark.parametrize("name", HASHES)
def test_a_job_keeps_its_hash(name: str) -> None:
    """New fields with their default values are in neither the hash nor the dump; a field that is set is in both."""
    spec = load(JOBS / name)
    assert spec_hash(spec) == HASHES[name]
    assert "loss" not in spec.model_dump()["train"]
    assert not {"train.loss.name", "optim.options", "parallel.options"} & spec.numbers("f").keys()
    own = load(JOBS / name, ["train.loss.options={}", "optim.options={}", "train.loss=cross_entropy"])
    assert spec_hash(own) == HASHES[name]
    assert "cross_entropy" not in dump(own)


def test_a_field_that_is_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loss and an optimizer's options are among the numbers that a resumed run must match; a strategy's are not."""
    (tmp_path / "counts_own.py").write_text("def build(*given): ...\nStrategy = build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    numbers = load(
        JOBS / "quickstart.yaml",
        ["train.loss=counts_own:build", "optim={name: 'counts_own:build', options: {a: 1}}",
         "parallel={strategy: 'counts_own:Strategy', options: {a: 1}}"],
    ).numbers("f")  # fmt: skip
    assert (numbers["train.loss.name"], numbers["optim.options.a"]) == ("counts_own:build", 1)
    assert not any(name.startswith("parallel") for name in numbers)


def test_a_built_in_without_options_takes_none() -> None:
    """The error names the option and the extension."""
    with pytest.raises(
        SpecError, match=r"--set optim\.options: optim\.options: beta: adamw has no options; remove them"
    ):
        load(JOBS / "quickstart.yaml", ["optim.options={beta: 1}"])


def test_a_file_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the statements that a name needs are executed, for any module; an error in one of them names it."""
    text = [
        "from __future__ import annotations",
        "import nothing_of_that_name",
        "from typing import Any, nothing_else",
        "from pydantic import BaseModel",
        "raise SystemExit",
        "LIMIT = 3",
        "def most() -> nothing_of_that_name.Thing: return LIMIT",
        "class Options(BaseModel):",
        "    a: Any = most()",
        "PLAN = undefined",
    ]
    (tmp_path / "picked_own.py").write_text("\n".join(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = options_model("model", "picked_own:build")
    assert options is not None
    assert options().model_dump() == {"a": 3}
    assert registry.described("model", "picked_own:build", "check_spec") is None
    with pytest.raises(ExtensionNotFound, match="PLAN of picked_own cannot be read: NameError"):
        registry.described("model", "picked_own:build", "PLAN")
    assert "picked_own" not in sys.modules
