"""A DeepSpeed configuration file -> fields of a job's spec, and a word on each field that has no counterpart.

Runs anywhere. fields.py is the table of what becomes of each field, rules.py and training.py are its functions. Here the
file is read and checked, and what came of it is given as values, as warnings, or as YAML.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raydist.errors import SpecError
from raydist.parsing import JOB_BYTES, parse_json, quoted, read_text
from raydist.printable import printable
from raydist.spec.deepspeed.fields import FIELDS, RULES
from raydist.spec.deepspeed.reading import Field, Reading

_SECTIONS = {name.rsplit(".", n)[0] for name in FIELDS for n in range(1, name.count(".") + 1)}


@dataclass(frozen=True)
class Converted:
    """What a file says, in raydist's words."""

    path: str
    tree: dict[str, Any]
    """Fields of the spec, nested."""
    sources: dict[str, str]
    """Dotted name in the spec -> the field of the file that it comes from."""
    dropped: dict[str, str]
    """Field of the file that has no counterpart -> why, or empty."""
    own: list[str]
    """Fields of the file that are off, or ask for what raydist does by itself."""
    auto: list[str]
    """Fields of the file that say "auto"."""
    notes: list[str]
    """What means something else here than there."""
    problems: list[str]
    """What is wrong; each is a line that begins with the file."""

    def warnings(self) -> list[str]:
        """What a user has to know: one line of all that is dropped, one of what needs nothing, one a note."""
        return [f"{self.path}: {line}" for line in self._lines()]

    def origin(self) -> dict[str, str]:
        """Dotted name in the spec -> file and field, for messages about the value."""
        return {name: f"{self.path} ({source})" for name, source in self.sources.items()}

    def to_yaml(self, head: str = "") -> str:
        """The fields as a piece of a job file, below the lines `head`; comments say whence each comes, and what is left out."""
        comments = [f"Made of {Path(self.path).name} by `raydist convert deepspeed`.", *self._lines()]
        if self.auto:
            comments.append(f'"auto", left to the spec: {", ".join(self.auto)}')
        lines = [
            textwrap.fill(c, 118, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
            for c in comments
        ]
        lines += [*head.splitlines(), *self._section(self.tree, "")]
        if not head and not self.tree:
            lines.append("{}")
        return "\n".join(lines) + "\n"

    def _lines(self) -> list[str]:
        dropped = [f"{name} ({why})" if why else name for name, why in self.dropped.items()]
        lines = [f"no counterpart here, left out: {', '.join(dropped)}"] if dropped else []
        lines += [f"off, or done by raydist itself: {', '.join(self.own)}"] if self.own else []
        return lines + self.notes

    def _section(self, tree: Mapping[str, Any], prefix: str) -> list[str]:
        lines: list[str] = []
        for key, value in tree.items():
            name, indent = f"{prefix}{key}", "  " * prefix.count(".")
            if isinstance(value, dict):
                lines += [f"{indent}{key}:", *self._section(value, f"{name}.")]
            else:
                shown = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True)
                lines.append(f"{indent}{key}: {shown.strip()[1:-1]}  # {self.sources[name]}")
        return lines


def convert(path: str | Path, spec: Mapping[str, Any] | None = None, nearer: Collection[str] = ()) -> Converted:
    """The file, for a spec that says `spec` besides (dotted names), of which the fields `nearer` beat the file.

    `spec` is looked at and not repeated: its workers tie the batch sizes together, and a run that has a length keeps it.
    Raises SpecError for a file that cannot be read; `problems` has what is wrong inside it.
    """
    checked = _Checked()
    checked.walk(_read(Path(path)), "")
    reading = Reading(checked.given, checked.auto, spec or {}, nearer)
    for rule in RULES:
        rule(reading)
    for name in checked.given:
        if name not in reading.used:
            reading.lose(name, "")
    tree: dict[str, Any] = {}
    for name, value in reading.fields.items():
        *sections, leaf = name.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[leaf] = value
    return Converted(
        path=str(path),
        tree=tree,
        sources=reading.sources,
        dropped=dict(sorted((checked.dropped | reading.dropped).items())),
        own=sorted(checked.own),
        auto=sorted(checked.auto),
        notes=reading.notes,
        problems=[f"{path}: {line}" for line in checked.problems + reading.problems],
    )


@dataclass
class _Checked:
    """A file's fields, sorted by what the table says of them."""

    given: dict[str, Any] = field(default_factory=dict)
    auto: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def walk(self, section: Mapping[str, Any], prefix: str) -> None:
        """Sorts a section's fields, and those of the sections in it."""
        off = section.get("enabled") is False or section.get("device") == "none"
        for key, value in section.items():
            name = f"{prefix}{key}"
            if value is None:
                continue  # as if it were not there
            if name in FIELDS:
                if off and key not in ("enabled", "device"):
                    self.own.append(name)
                else:
                    self._field(name, value, FIELDS[name])
            elif name not in _SECTIONS:
                self._unknown(name, key, prefix)
            elif name == "zero_optimization" and isinstance(value, bool):
                self.given[f"{name}.stage"] = int(value)  # as the first releases had it
            elif isinstance(value, dict):
                self.walk(value, f"{name}.")
            elif value is not False:
                self.problems.append(f"{name}: {value!r} is not a section; write its fields in braces")

    def _field(self, name: str, value: Any, known: Field) -> None:
        if value == "auto":
            self.auto.append(name)
        elif known.check is not None:
            try:
                self.given[name] = known.check(value)
            except ValueError as error:
                self.problems.append(f"{name}: {value!r} is not {error}; correct it, or take it out")
        elif known.own or _is_off(value, known):
            self.own.append(name)
        else:
            self.dropped[name] = known.why

    def _unknown(self, name: str, key: str, prefix: str) -> None:
        depth = prefix.count(".")
        here = {n.split(".")[depth] for n in FIELDS if n.startswith(prefix)}
        near = [prefix + n for n in difflib.get_close_matches(key, sorted(here), n=1, cutoff=0.75)]
        near += [n for n in FIELDS if n.rsplit(".", 1)[-1] == key]
        if near:
            self.problems.append(f'{name}: unknown field; did you mean "{near[0]}"?')
        else:
            self.dropped[name] = "DeepSpeed does not know it either"


def _is_off(value: Any, known: Field) -> bool:
    if isinstance(value, dict):
        return not value or value.get("enabled") is False
    return value in known.off


def _read(path: Path) -> dict[str, Any]:
    """The file's JSON. Raises SpecError."""
    try:
        found = printable(parse_json(read_text(path, JOB_BYTES), pairs=_once))  # its names are printed
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.json")], n=1)
        hint = f'did you mean "{path.parent / near[0]}"?' if near else "check the path of the DeepSpeed file"
        raise SpecError(f"{path}: no such file; {hint}") from None
    except OSError as error:
        raise SpecError(f"{quoted(path)}: cannot be read: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: cannot be read: {error}; save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            "take out what only DeepSpeed reads: comments, trailing commas"
        ) from None
    except _Twice as error:
        raise SpecError(f"{path}: the key {error.args[0]!r} stands twice; take one of them out") from None
    except ValueError as error:
        raise SpecError(f"{path}: cannot be read: {error}; give a smaller or simpler file") from None
    if not isinstance(found, dict):
        raise SpecError(f'{path}: holds {type(found).__name__}, not fields; begin with {{"train_batch_size": ...}}')
    return found


class _Twice(Exception):
    """A key that stands twice in one section; DeepSpeed refuses it, too."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found
