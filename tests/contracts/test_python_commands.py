"""Each command has a function of the Python API that takes its options: docs/how-to/python.md's table, held."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

import raydist
from raydist.cli.main import app

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "python.md"
SHOWN = {"help", "json", "csv", "markdown", "follow", "tail", "yes", "tree", "every", "storage"}
"""Options for what is printed, and how; and for where a run is, which a Run knows."""
RENAMED = {"no-wait": {"wait"}, "metric": {"metrics"}, "from": {"measured_by"}, "out": {"out", "path", "folder"}}
MORE: dict[str, set[str]] = {
    "trace": {"out"},  # a copy of the file that the result names
    "plan": {"out"},  # what to write is the result
    "sweep best": {"out"},  # likewise
    "sample": {"message", "trust"},  # of `Chat.add`; and `Run.sample` is called in the user's process, as `Run.model`
}
"""Options that are not arguments, and why."""
ALONE = {
    "bench comm", "convert deepspeed", "dashboard", "data show", "data verify", "deploy compose", "deploy kuberay", "deploy slurm",
    "faults", "init", "schema",
}  # fmt: skip
"""Commands without a function: they serve, write files, or print what is of no run."""


def table() -> dict[str, list[Callable[..., Any]]]:
    """Command -> the functions of its row."""
    places = {"run": raydist.Run, "sweep": raydist.Sweep, "raydist": raydist}
    found = {}
    for row in GUIDE.read_text().splitlines():
        if row.startswith("| `"):
            left, right = (re.findall(r"`([^`(]+)[^`]*`", cell) for cell in row.split("|")[1:3])
            calls = [getattr(places[place], name) for place, name in (each.split(".") for each in right)]
            found |= {words: [getattr(call, "fget", call) for call in calls] for words in left}
    return found


def commands() -> dict[str, Any]:
    """Words -> command; that of `raydist sweep FILE` has one word."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", {})
        found |= {f"{name} {word}".removesuffix(" run"): each for word, each in inner.items()} or {name: command}
    return found


def test_no_command_is_left_out() -> None:
    """Each command has a row, but those of ALONE."""
    rows = {words.split(" --")[0] for words in table()}
    assert commands().keys() - rows == ALONE
    assert MORE.keys() <= rows


@pytest.mark.parametrize("words", sorted({words.split(" --")[0] for words in table()}))
def test_each_option_is_an_argument(words: str) -> None:
    """Of a function of the command's row, with its name. An option with a row of its own is a function."""
    rows = {row.partition(" --")[2]: calls for row, calls in table().items() if row.split(" --")[0] == words}
    taken = {name for calls in rows.values() for call in calls for name in inspect.signature(call).parameters}
    options = {o.removeprefix("--") for p in commands()[words].params for o in p.opts if o.startswith("--")}
    options -= SHOWN | MORE.get(words, set()) | rows.keys()
    assert [o for o in options if not RENAMED.get(o, {o.replace("-", "_")}) & taken] == []
