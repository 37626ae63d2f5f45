"""Exports a run to Weights & Biases: its job as config, its steps and evaluations as curves. Needs `raydist[wandb]`.

Runs in: the run's monitor, and wandb-core, a process that wandb starts there and that ends with the monitor; it sends what the
exporter gives it, and keeps it in files until then. A resumed run continues the same W&B run, named in RUN/wandb.json. The step is
a column, because W&B ignores points whose own step number is not the largest: a step that was trained twice has both points.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from raydist.errors import UserError
from raydist.observe.exporters import BaseExporter, Facts, curves
from raydist.parsing import parse_json
from raydist.paths import local_path
from raydist.redact import redact
from raydist.run.directory import RunDir
from raydist.spec.parts import Part

FILE = "wandb.json"
PROJECT = "raydist"
_INIT_S = 30.0
"""A server that does not answer for so long is an error; the caller tries again."""
_PRIVATE = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "quiet": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""W&B gets the job and its curves, and nothing that wandb finds by itself: source code, command line, installed packages, host."""
_GOOD_ENDS = ("finished", "paused")


class Options(Part):
    """Where the run is recorded in Weights & Biases."""

    project: str | None = Field(None, description="Name of the project; default: raydist.")
    entity: str | None = Field(None, description="User or team; default: that of the API key.")
    group: str | None = Field(None, description="Group of the W&B run; default for a sweep's cell: the sweep's name.")
    tags: list[str] | None = Field(None, description="Tags of the W&B run.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: files for `wandb sync` alone; default: $WANDB_MODE of the driver, or online."
    )
    url: str | None = Field(None, description="Address of your own W&B server; default: $WANDB_BASE_URL of the driver.")
    dir: str | None = Field(None, description="Folder on this host for wandb's files; default: the run's folder.")


class Exporter(BaseExporter):
    """Options: `project`, `entity`, `group`, `tags`, `mode`, `url`, `dir`."""

    def __init__(self, facts: Facts) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports of wandb's own errors to its authors
        import wandb

        self._rows: deque[dict[str, Any]] = deque()
        self._facts_now: dict[str, Any] = {}
        self._exit_code = 1
        options = dict(facts.options)
        mode, url, folder = (options.pop(name) for name in ("mode", "url", "dir"))
        Path(folder).mkdir(parents=True, exist_ok=True)
        known = _known(facts.run, options)
        settings = {**_PRIVATE, "init_timeout": _INIT_S, **({"base_url": url} if url else {})}
        self._run = wandb.init(
            **options,
            id=known or secrets.token_hex(4),
            resume="allow",
            name=facts.run.name,
            config=facts.fields(),
            mode=mode,
            dir=folder,
            reinit="create_new",
            settings=wandb.Settings(**settings),
        )
        for names in ("train/*", "eval/*"):
            self._run.define_metric(names, step_metric="step")
        if known is None:
            identity = {"entity": options["entity"], "project": options["project"], "id": self._run.id}
            facts.run.storage.write(FILE, json.dumps(identity).encode())
        place = self._run.url if mode == "online" else f"wandb sync {Path(self._run.dir).parent}"
        facts.note(f"wandb: run {self._run.id}: {redact(place)}")

    @staticmethod
    def resolve(options: Mapping[str, Any], run: RunDir) -> dict[str, Any]:
        """The options, complete. Raises UserError if wandb is missing, or has no place for its files."""
        asked = Options(**options)
        if find_spec("wandb") is None:
            raise UserError("wandb is not installed", 'pip install "raydist[wandb]"')
        if asked.dir is None and run.storage.local is None:
            raise UserError(
                f"wandb cannot keep its files on {run.uri.partition('://')[0]}://",
                "give options: {dir: FOLDER}, on this host",
            )
        folder = local_path(asked.dir) if asked.dir else Path(run.storage.path(""))
        mode = asked.mode or ("offline" if os.environ.get("WANDB_MODE") == "offline" else "online")
        url = asked.url or os.environ.get("WANDB_BASE_URL")
        chosen = {"project": asked.project or PROJECT, "mode": mode, "url": url, "dir": str(folder.absolute())}
        return {**asked.model_dump(), **chosen}

    def attempt(self, number: int, resume_step: int, at: float) -> None:
        """Sets the newest attempt and its resume step in the summary."""
        self._facts_now |= {"raydist.attempt": number, "raydist.resume_step": resume_step}

    def steps(self, rows: Sequence[Mapping[str, Any]], at: float) -> None:
        """The same curves as in TensorBoard, over the column `step`."""
        self._rows += ({"step": row["step"], **curves(row)} for row in rows)

    def event(self, event: Mapping[str, Any]) -> None:
        """Evaluations, the cause of the newest failure, and whether the run came to a good end."""
        if event["kind"] == "eval":
            self._rows.append({"step": event["step"], "eval/loss": event["loss"]})
        elif event["kind"] == "failure":
            self._facts_now["raydist.failure"] = str(event["cause"])
        elif event["kind"] == "ended":
            self._exit_code = 0 if event["status"] in _GOOD_ENDS else 1

    def flush(self) -> None:
        """Gives the buffered data to wandb-core. Raises wandb's errors, and keeps what it has not taken."""
        while self._rows:
            self._run.log(self._rows[0])
            self._rows.popleft()
        if self._facts_now:
            self._run.summary.update(self._facts_now)
            self._facts_now.clear()

    def close(self) -> None:
        """The last flush; waits until all is sent. If that takes too long, `wandb sync` sends the rest."""
        self.flush()
        self._run.finish(exit_code=self._exit_code)


def _known(run: RunDir, options: Mapping[str, Any]) -> str | None:
    """The id of the W&B run in this project that an earlier driver or monitor created; None if there is none."""
    try:
        known = parse_json(run.storage.read(FILE))
    except FileNotFoundError:
        return None
    same = (known["entity"], known["project"]) == (options["entity"], options["project"])
    return str(known["id"]) if same else None
