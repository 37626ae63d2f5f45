"""Plain values against a model of pydantic: a valid one, or a line a problem, with place, field, value and remedy.

Runs anywhere.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raydist import registry
from raydist.spec.parts import SpecValueError

Model = TypeVar("Model", bound=BaseModel)


def validate(
    root: type[Model], tree: Mapping[str, Any], origin: Mapping[str, str], source: str, see: str
) -> tuple[Model | None, list[str]]:
    """The `root` of plain values, and a line for each problem: it is what was asked only where there is none.

    `origin` says for each dotted field where it was written, and `source` for all others; `see` where a user reads more.
    """
    problems: list[str] = []
    left = dict(tree)
    bad: set[str] = set()
    # A wrong type hides the combinations of its section from pydantic: take the field out and look again.
    while True:
        try:
            return root.model_validate(left), problems
        except ValidationError as error:
            details = error.errors()
            for detail in details:
                if not (names := _names(root, detail)) & bad:
                    problems.append(_line(root, detail, origin, source, see))
                bad |= names
            smaller = left
            for detail in details:
                smaller = _without(root, smaller, _known_fields(root, detail["loc"])[0])
            if smaller == left:
                return None, problems
            left = smaller


def where(field: str, origin: Mapping[str, str], source: str) -> str:
    """The place in which a dotted field, or the nearest section around it, was written."""
    parts = field.split(".")
    while parts:
        if (place := origin.get(".".join(parts).partition("[")[0])) is not None:
            return place
        parts.pop()
    return source


def _line(root: type[BaseModel], detail: Any, origin: Mapping[str, str], source: str, see: str) -> str:
    """One problem, as pydantic found it, on one line: file: field: value: what; remedy."""
    field = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        field = f"{field}.{cause.field}" if field else cause.field
        value = "" if cause.value is None else f" {cause.value!r}"
        return f"{where(field, origin, source)}: {field}:{value} {cause.what}; {cause.remedy}"
    parts, known = _known_fields(root, detail["loc"])
    field = ".".join(parts)
    place = where(field, origin, source)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5) or [
            f for f in everywhere(root) if f.rsplit(".", 1)[-1] == parts[-1] and "[" not in field
        ]
        remedy = f'did you mean "{near[0]}"?' if near else f"fields here: {', '.join(known)}"
        return f"{place}: {field}: unknown field; {remedy}"
    if detail["type"] == "missing":
        return f"{place}: {field}: is missing; add it"
    value = detail["input"]
    if detail["type"] == "literal_error":
        choices = [c.strip().strip("'\"") for c in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return f"{place}: {field}: unknown {value!r}; {registry.did_you_mean(str(value), choices)}"
    shown = repr(value) if len(repr(value)) < 60 else type(value).__name__
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{place}: {field}: {shown}: {message}; see {see}"


def _known_fields(root: type[BaseModel], loc: Sequence[Any]) -> tuple[list[str], list[str]]:
    """A pydantic location without the names of union branches, and the fields that its section has."""
    model: Any = root
    parts: list[str] = []
    known: list[str] = list(root.model_fields)
    for part in loc:
        if model is None:
            break
        if isinstance(part, int):  # the place in a list of sections
            parts[-1] += f"[{part}]"
            continue
        parts.append(str(part))
        known = list(model.model_fields)
        info = model.model_fields.get(part)
        model = _section(info.annotation) if info is not None else None
    return parts, known


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, typing.Annotated):
        return next((s for a in typing.get_args(annotation) if (s := _section(a))), None)
    if typing.get_origin(annotation) is list:
        return _section(typing.get_args(annotation)[0])
    return None


@cache
def everywhere(root: type[BaseModel]) -> tuple[str, ...]:
    """The dotted names of all its fields and sections."""

    def walk(model: type[BaseModel], prefix: str) -> list[str]:
        found: list[str] = []
        for name, info in model.model_fields.items():
            found.append(prefix + name)
            if section := _section(info.annotation):
                found += walk(section, f"{prefix}{name}.")
        return found

    return tuple(walk(root, ""))


def _names(root: type[BaseModel], detail: Any) -> set[str]:
    """The fields that a problem is about, without their sections."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        return {cause.field, *cause.what.replace(",", " ").replace(":", " ").split()} & {
            f.rsplit(".", 1)[-1] for f in everywhere(root)
        }
    return {_known_fields(root, detail["loc"])[0][-1]} if detail["loc"] else set()


def _without(root: type[BaseModel], tree: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """A copy of `tree` that lacks the field at `parts`."""
    if not parts or parts[0] not in tree:
        return tree
    copy = dict(tree)
    if len(parts) > 1 and isinstance(copy[parts[0]], dict):
        copy[parts[0]] = _without(root, copy[parts[0]], parts[1:])
    elif (len(parts) == 1 and parts[0] not in root.model_fields) or not isinstance(copy[parts[0]], dict):
        del copy[parts[0]]
    return copy
