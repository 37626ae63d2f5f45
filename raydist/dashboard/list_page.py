"""The list of the runs and sweeps in the dashboard's storages.

Runs anywhere. Reads small files only: of a run its state, of a sweep its events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from raydist.dashboard.document import Parts, parts
from raydist.errors import StorageError
from raydist.parsing import LINE_BYTES, parse_json
from raydist.report import summary, text
from raydist.report.html.elements import Child, Markup, tag
from raydist.report.html.page import missing, section, table
from raydist.report.html.run import status
from raydist.run.directory import EVENTS, SPEC, RunDir
from raydist.run.lease import newest_driver
from raydist.run.status import read_state
from raydist.run.sweep_directory import SweepDir
from raydist.run.sweep_state import fold
from raydist.storage import Storage

_COLUMNS = ("name", "status", "started", "steps>", "loss>", "eval loss>", "tokens/s>", "cause or cells~")
_TAIL = 1 << 16
"""Bytes at the end of a run's events in which its cause is looked for."""


def rows(home: Storage) -> list[dict[str, Any]]:
    """The runs and sweeps of a storage, the newest first: kind, name, status, since (Unix time or None), cause, and of a run its
    figures. Raises StorageError if the storage cannot be listed.
    """
    found = [row for row in summary.of_each(home, lambda name: _row(home, name)) if row is not None]
    return sorted(found, key=lambda row: (-(row["since"] or 0.0), row["name"]))


def _row(home: Storage, name: str) -> dict[str, Any] | None:
    run, sweep = RunDir(home.at(name)), SweepDir(home.at(name))
    try:
        if run.storage.size(SPEC) is not None:
            return _run(run)
        return _sweep(sweep) if sweep.exists() else None
    except StorageError as error:
        return {"kind": "run", "name": name, "status": "damaged", "since": None, "cause": str(error)}


def _run(run: RunDir) -> dict[str, Any]:
    state = read_state(run)
    since = (state.get("driver") or {}).get("since")
    cause = _cause(run) if state["status"] == "stopped" else ""
    return {"kind": "run", "name": run.name, "since": since, "cause": cause, **summary.row(run, state)}


def _cause(run: RunDir) -> str:
    """Why it stopped, from the end of its events; empty if it is not there."""
    try:
        with run.storage.open(EVENTS) as file:
            file.seek(max(file.size() - _TAIL, 0))
            lines = bytes(file.read()).splitlines()
        ends = [parse_json(line, LINE_BYTES) for line in lines[-3:] if b'"ended"' in line]
        return str(ends[-1].get("cause") or "").partition("\n")[0] if ends else ""
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        return ""


def _sweep(sweep: SweepDir) -> dict[str, Any]:
    events = sweep.events()
    states = fold(events)
    driver = newest_driver(sweep)
    counts: Counter[str] = Counter(
        states[cell.id].status if cell.id in states else "waiting" for cell in sweep.cells(events)
    )
    running = driver is not None and driver.alive
    if not running:  # what runs in the events of a driver that is gone has been lost
        counts["lost"] += counts.pop("running", 0)
    words = ", ".join(f"{n:,} {name}" for name, n in counts.items() if n)
    name = "running" if running else "lost" if counts["lost"] else "finished"
    return {
        "kind": "sweep",
        "name": sweep.name,
        "status": name,
        "since": driver.since if driver else None,
        "cause": words,
    }


def page(homes: Sequence[Storage], listed: Sequence[list[dict[str, Any]] | str]) -> Parts:
    """The parts of the page: the heading, and one section for each storage."""
    every = [row for one in listed if isinstance(one, list) for row in one]
    states = Counter(row["status"] for row in every) + Counter(sweep=sum(row["kind"] == "sweep" for row in every))
    field = tag("label", "show rows with", tag("input", type="search", id="filter", autocomplete="off", size=36))
    head = tag(
        "header",
        tag("h1", "Runs and sweeps"),
        tag("p", f"{len(every):,} in {len(homes)} storage{'s' if len(homes) > 1 else ''}", class_="path quiet"),
        tag(
            "p",
            "Only: ",
            *[[tag("a", f"{name} ({n:,})", href=f"?q={name}"), " "] for name, n in sorted(states.items())],
        ),
        id="head",
    )
    sections: dict[str, Markup] = {}
    for i, (home, one) in enumerate(zip(homes, listed, strict=True)):
        sections |= _sections(i, home.uri, one)
    find = tag("div", tag("form", field, class_="view", role="search"), id="find")
    return parts("Runs and sweeps", {"head": head, "find": find, **sections})


def _sections(storage: int, uri: str, listed: list[dict[str, Any]] | str) -> dict[str, Markup]:
    """What runs is a section of its own: only this one is sent again and again."""
    if isinstance(listed, str) or not listed:
        words = (
            listed
            if isinstance(listed, str)
            else "There is no run and no sweep yet: raydist train JOB.yaml starts one."
        )
        return {f"storage-{storage}": section(uri, missing(words), id=f"storage-{storage}")}
    made = {}
    for name, title, running in (("running", f"{uri}: running", True), ("storage", uri, False)):
        if rows := [row for row in listed if (row["status"] == "running") == running]:
            id = f"{name}-{storage}"
            made[id] = section(title, table(_COLUMNS, [_cells(storage, row) for row in rows]), id=id)
    return made


def _cells(storage: int, row: dict[str, Any]) -> tuple[Child, ...]:
    address = f"/{row['kind']}/{storage}/{quote(row['name'], safe='')}"
    name = tag("a", row["name"], href=address, data_filter=True)
    state = status(row["status"])
    since = f"{datetime.fromtimestamp(row['since'], UTC):%Y-%m-%d %H:%M}" if row["since"] else "-"
    if row["kind"] == "sweep":
        return [name, " (sweep)"], state, since, "-", "-", "-", "-", row["cause"]
    figures = (
        "-" if row.get("steps") is None else f"{row['steps']:,}",
        text.loss(row.get("loss")),
        text.loss(row.get("eval_loss")),
        text.rate(row.get("tokens_per_second")),
    )
    return name, state, since, *figures, row["cause"]
