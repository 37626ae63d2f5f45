"""docs/reference/records.md is an interface: it documents the records and events that the code writes."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from raydist.observe.run_monitor import RunMonitor
from raydist.records import Status, StepRecord
from raydist.report import summary
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import FIELDS
from raydist.run.status import last_word

ROOT = Path(__file__).parents[2]
SECTIONS = dict(
    re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/reference/records.md").read_text(), re.M | re.S)
)


def rows(section: str) -> dict[str, str]:
    """The tables of a section: each name in a first column -> the rest of its row."""
    found = {}
    for names, rest in re.findall(r"^\| (`[^|]+`) \|(.*)$", SECTIONS[section], re.M):
        found.update(dict.fromkeys(re.findall(r"`(\w+)`", names), rest))
    return found


def kinds_in_code() -> dict[str, set[str]]:
    """Kind of event -> the data keys that some call of `Event(...)` or `say(kind, key=...)` in raydist/ writes."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "raydist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if (
                name in ("Event", "say", "_say", "_event")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                keys = found.setdefault(first.value, set())
                keys.update(keyword.arg for keyword in node.keywords if keyword.arg)
                data = node.args[2] if len(node.args) > 2 else None
                if isinstance(data, ast.Dict):
                    keys.update(k.value for k in data.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
    return found


def test_step_fields() -> None:
    """Each field of StepRecord is a row, in order, and the columns' descriptions begin with the same words."""
    documented = rows("Steps")
    assert list(documented) == [f.name for f in dataclasses.fields(StepRecord)]
    for name, (_, description) in FIELDS.items():
        assert description in documented[name]


def test_event_kinds() -> None:
    """Each kind of event that the code writes is a row; each documented kind is written, or shown by the display."""
    documented, written = rows("Events"), kinds_in_code()
    assert written, "no event was found in raydist/: this test looks for the wrong calls"
    assert set(written) <= set(documented), "an undocumented kind"
    shown = (ROOT / "raydist/report/text.py").read_text()
    assert all(f'case "{kind}"' in shown for kind in documented)


def test_event_data() -> None:
    """Each key that the code writes into an event is in that event's row."""
    documented = rows("Events")
    for kind, keys in kinds_in_code().items():
        missing = {key for key in keys if f"`{key}`" not in documented[kind]}
        assert not missing, f"{kind}: {missing} not in docs/reference/records.md"
        assert not keys & {"v", "kind", "at"}, f"{kind}: a key of its data would hide one of the line's own"


def test_state_and_show(tmp_path: Path) -> None:
    """Each key of state.json and of show's object is a row, and so is each status."""
    run = RunDir(tmp_path / "a-run")
    run.storage.write(SPEC, b"name: a-run\n")
    watch = RunMonitor(run.uri, interval_s=60.0)
    watch.end("finished")
    state: dict[str, Any] = last_word(run) or {}
    documented = rows("state.json")
    assert set(state) == set(documented) - set(get_args(Status))
    assert set(get_args(Status)) <= set(documented)
    assert all(f"`{key}`" in documented["driver"] for key in state["driver"])
    assert set(summary.show(run)) == set(rows("show"))


@pytest.mark.parametrize("key", ["attempts", "checkpoints", "faults", "workers"])
def test_shows_lists(key: str, trained: Callable[..., tuple[RunDir, RunMonitor]]) -> None:
    """Each key of the objects in show's lists is in that list's row."""
    run, _ = trained()
    for name in summary.show(run)[key][0]:
        assert f"`{name}`" in rows("show")[key]
