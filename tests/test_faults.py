"""Fault files: how they are read, the errors in them, and their documentation."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist import faults, registry
from raydist.errors import SpecError
from raydist.faults import KINDS, Fault, Kill, Raise, StorageGone
from raydist.records import Event
from raydist.run.directory import RunDir
from raydist.spec import JobSpec

DOCS = Path(__file__).parents[1] / "docs"
JOB = JobSpec.model_validate({"data": {"source": "any"}, "train": {"steps": 9}, "cluster": {"workers": 2}})
RULE = re.compile(r"^\| `(\w+)` \| ([^|]+) \|$", re.M)
REQUIRED: dict[str, Any] = {"rank": 0, "step": 3, "seconds": 1.0}
"""The required fields of all kinds of faults."""


def load(folder: Path, text: str) -> tuple[Fault, ...]:
    """Loads the faults of a file with this text, for JOB."""
    path = folder / "faults.yaml"
    path.write_text(text)
    return faults.load(path, JOB)


def test_a_file_is_a_list_of_faults(tmp_path: Path) -> None:
    """Written as in Python; the job carries the faults as plain values, and they are equal after a round trip."""
    made = load(tmp_path, "- {fault: kill, rank: 1, step: 7}\n- {fault: storage_gone, step: 2, operations: 3}\n")
    assert made == (Kill(rank=1, step=7), StorageGone(step=2, operations=3))
    assert faults.parse(yaml.safe_load(yaml.safe_dump([f.model_dump(mode="json") for f in made]))) == made


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{fault: kil, rank: 1, step: 7}", "fault 1: fault: unknown 'kil'; did you mean \"kill\"?"),
        ("{rank: 1, step: 7}", "fault 1: fault: is missing; there are: "),
        ("{fault: kill, rank: 1, step: 7, phse: save}", 'fault 1: kill: phse: unknown field; did you mean "phase"?'),
        ("{fault: kill, rank: 1}", "fault 1: kill: step: is missing; add it"),
        (
            "{fault: kill, rank: 1, step: 0}",
            "fault 1: kill: step: 0: input should be greater than or equal to 1; `raydist",
        ),
        ("{fault: kill, rank: 1, step: 7, phase: forwards}", "phase: unknown 'forwards'; did you mean \"forward\"?"),
        (
            "{fault: disk_full, step: 7}",
            "seconds: None and operations: exactly one of them is needed; give one of them",
        ),
        (
            "{fault: kill, rank: 2, step: 7}",
            "rank: 2: the job has ranks 0 to 1; give one of them, or raise cluster.workers",
        ),
        ("{fault: kill, rank: 1, step: 10}", "step: 10: the job ends after step 9; give an earlier one"),
        ("{fault: expert_imbalance, step: 7}", "the model gpt has no experts; remove it, or use a model with experts"),
        (
            "{fault: reading, step: 7, column: gpu_pcie_widht, value: 4}",
            'is not a column; did you mean "gpu_pcie_width"?',
        ),
        (
            "{fault: reading, step: 7, column: gpu_throttle, value: 4}",
            "value: 4.0 does not fit gpu_throttle; give text",
        ),
        ("kill", "fault 1: 'kill' is not a fault; write {fault: kill"),
    ],
)
def test_what_is_wrong_is_told_with_its_remedy(tmp_path: Path, line: str, told: str) -> None:
    """The error names file, fault, field, value and remedy, in one line."""
    with pytest.raises(SpecError) as caught:
        load(tmp_path, f"- {line}\n")
    assert caught.value.message.startswith(f"{tmp_path}/faults.yaml: fault 1: ")
    assert told in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """One line per problem; a file that is no list, or does not exist, is one problem."""
    with pytest.raises(SpecError) as caught:
        load(
            tmp_path, "- {fault: kil, step: 1}\n- {fault: kill, rank: 0, step: 1}\n- {fault: kill, rank: 7, step: 12}\n"
        )
    assert [line.split(": ")[1] for line in caught.value.message.splitlines()] == ["fault 1", "fault 3", "fault 3"]
    with pytest.raises(SpecError, match="holds dict, not a list"):
        load(tmp_path, "fault: kill\n")
    with pytest.raises(SpecError, match=r'no such file; did you mean ".*faults.yaml"'):
        faults.load(tmp_path / "fault.yaml", JOB)


def test_a_name_is_a_fault_s_own_whatever_stands_around_it() -> None:
    """A fault's name does not depend on its neighbours: after lines are added or removed, a fault that happened does not happen
    again. Equal faults get different names."""
    kill, bug = Kill(rank=1, step=7), Raise(rank=0, step=3)
    (name,) = faults.names([kill])
    assert faults.names([bug, kill, kill])[1] == name
    assert len(set(faults.names([bug, kill, kill]))) == 3


def test_notes_are_read_in_the_order_of_what_happened(tmp_path: Path) -> None:
    """The order is by time, whatever their names; notes that are known are not read again."""
    run = RunDir(tmp_path)
    assert faults.read_notes(run) == {}
    for name, at in (("a", 2.0), ("b", 1.0)):
        run.storage.write(
            faults.note(name, 0, 1), f'{{"fault": "kill", "rank": 0, "step": 3, "attempt": 1, "at": {at}}}'.encode()
        )
    run.storage.write(faults.done(faults.note("a", 0, 1)), b"{}")
    assert list(faults.read_notes(run)) == ["faults/b-rank0-1.json", "faults/a-rank0-1.json"]
    assert list(faults.read_notes(run, known=["faults/b-rank0-1.json"])) == ["faults/a-rank0-1.json"]


@pytest.mark.parametrize("name", KINDS)
def test_every_fault_stands_in_the_docs(name: str) -> None:
    """A row of docs/explanation/faults.md has its name, its fields, its effect and how raydist reacts."""
    rows = {
        m[1]: m[0]
        for m in re.finditer(
            r"^\| `(\w+)` \|[^|]+\|[^|]*\S[^|]*\|$", (DOCS / "explanation/faults.md").read_text(), re.M
        )
    }
    assert name in rows
    own = set(KINDS[name].model_fields) - {"fault", "rank", "step", "times", "phase"}
    assert all(f"`{field}`" in rows[name] for field in own), own


def test_every_rule_of_the_doctor_can_be_tried() -> None:
    """A second table has each rule with the faults, or the settings, that bring about its finding."""
    rows = dict(RULE.findall((DOCS / "explanation/faults.md").read_text().partition("| rule | faults")[2]))
    assert sorted(rows) == registry.names("diagnosis")
    unknown = [name for text in rows.values() for name in re.findall(r"`(\w+)`", text) if name not in KINDS]
    assert unknown == []


@pytest.mark.parametrize("name", KINDS)
def test_every_field_has_its_help(name: str) -> None:
    """`raydist faults` lists every field with its description."""
    assert faults.summary(KINDS[name])
    assert all(len(told) > 3 for told in faults.fields(KINDS[name]).values())


def test_chaos_fails_without_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/chaos.py compares the events with the faults it asked for, each as often as it was asked for."""
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    chaos = importlib.import_module("chaos")
    wanted = [faults.Kill(rank=0, step=5), faults.Kill(rank=1, step=9), faults.KillDriver(step=12)]
    told = [Event("fault", 0.0, {"fault": "kill", "rank": 0, "step": 5}), Event("note", 0.0, {"text": "kill"})]
    names = ["kill on rank 0 in step 5", "kill on rank 1 in step 9", "kill_driver on rank 0 in step 12"]
    assert chaos.missing(wanted, told) == names[1:]
    assert chaos.missing(wanted, []) == names
    assert chaos.missing(wanted[:1], told) == []
    assert chaos.missing(wanted[1:2], told) == names[1:2], "another rank and step"
    assert chaos.missing([wanted[0]] * 2, told) == names[:1]
