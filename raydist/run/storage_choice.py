"""Chooses where runs are stored, with the reason: one rule for all commands.

Runs anywhere. Must import little: `raydist --help` and the ranks of torchrun use it.

The first of these that is set is used:

    --storage
    RAYDIST_STORAGE                        environment variable
    ~/.config/raydist/config.toml          `storage = "..."`; $XDG_CONFIG_HOME replaces ~/.config
    the nearest folder `runs`              in the current folder or one above it, if it contains raydist's runs (see `holds_runs`)
    ~/raydist

The driver of a Ray job runs in a temporary copy of the submitted folder: there the search for a folder `runs` is skipped.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raydist.errors import UserError
from raydist.parsing import TOML_BYTES, parse_toml, read_file
from raydist.paths import local_path

VARIABLE = "RAYDIST_STORAGE"
DEFAULT = "~/raydist"
FOLDER = "runs"
MARKS = (".data", ".tuned")
"""Folders that raydist creates next to runs: see raydist.run.directory."""
FIRSTS = ("spec.yaml", "cells.jsonl")
"""The file that marks a folder as a run, and the file that marks it as a sweep."""
_IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """The folder or URI that contains the runs, as given, including secrets.

    `source`: what set it; `because`: the same as text.
    """

    uri: str
    source: Literal["option", "environment", "configuration", "folder", "default"]
    because: str


def choose(storage: str | None = None) -> StorageChoice:
    """The storage of a command. `storage`: the value of its option `--storage`.

    Raises UserError if the user's configuration file cannot be read, or has unknown keys or invalid values.
    """
    if storage:
        return StorageChoice(storage, "option", "--storage")
    if given := os.environ.get(VARIABLE):
        return StorageChoice(given, "environment", f"the environment variable {VARIABLE}")
    if configured := _configured(config_file()):
        return StorageChoice(configured, "configuration", f"storage in {config_file()}")
    if (near := nearest()) is not None:
        return StorageChoice(str(near), "folder", f"the nearest folder {FOLDER!r} with raydist's runs")
    return StorageChoice(DEFAULT, "default", "the default")


def config_file() -> Path:
    """The path of the user's configuration file, which may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # XDG Base Directory Specification: relative paths are invalid and must be ignored.
    folder = Path(base) if os.path.isabs(base) else local_path("~/.config")
    return folder / "raydist" / "config.toml"


def nearest() -> Path | None:
    """The nearest folder `runs`, in the current folder or one above it, that belongs to this user and contains runs.

    None if there is none, and in a Ray job.
    """
    if _IN_RAY_JOB in os.environ:
        return None
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current folder was deleted
        return None
    for folder in (here, *here.parents):
        found = folder / FOLDER
        with suppress(OSError):
            # Another user's /tmp/runs must not decide where this user's run continues.
            if found.is_dir() and found.stat().st_uid == os.geteuid() and holds_runs(found):
                return found
    return None


def holds_runs(folder: Path) -> bool:
    """Whether the folder contains data of raydist: `.data` or `.tuned`, or a folder with a spec.yaml (a run) or a
    cells.jsonl (a sweep).
    """
    try:
        if any((folder / mark).is_dir() for mark in MARKS):
            return True
        with os.scandir(folder) as entries:
            return any(entry.is_dir() and any(Path(entry, name).is_file() for name in FIRSTS) for entry in entries)
    except OSError:
        return False


def others(choice: StorageChoice) -> list[str]:
    """Other well-known places with runs: the nearest folder `runs`, and ~/raydist, without `choice`."""
    default = local_path(DEFAULT)
    places = [place for place in (nearest(), default) if place is not None and holds_runs(place)]
    chosen = local_path(choice.uri).absolute() if "://" not in choice.uri else None
    return [str(place) for place in places if place != chosen]


def how_to_set() -> str:
    """How a user can choose another storage, in one line."""
    return f'look elsewhere with --storage, {VARIABLE}, or storage = "..." in {config_file()}'


def _configured(path: Path) -> str | None:
    try:
        settings = parse_toml(read_file(path, TOML_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "make it readable, or remove it") from None
    except ValueError as error:  # base class of tomllib.TOMLDecodeError and UnicodeDecodeError
        raise UserError(
            f"{path}: not valid TOML: {error}", 'write storage = "/folder/or/uri", or remove the file'
        ) from None
    for key in settings:
        if key != "storage":
            import difflib

            near = difflib.get_close_matches(key, ["storage"], cutoff=0.5)
            hint = 'did you mean "storage"?' if near else "allowed: storage"
            raise UserError(f'{path}: unknown key "{key}"', hint)
    value = settings.get("storage")
    if value is not None and (not isinstance(value, str) or not value):
        raise UserError(f"{path}: storage: {value!r}", 'give a folder or a URI in quotes: storage = "/data/runs"')
    return value
