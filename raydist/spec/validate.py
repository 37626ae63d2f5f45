"""Validates plain values with a pydantic model: a valid section, or a line for each problem, with place, field, value and remedy.

Runs anywhere. `extensions` finds the names of extensions in a tree, and checks them and their options.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from raydist import registry
from raydist.errors import ExtensionNotFound
from raydist.spec.parts import Extension, SpecValueError

Model = TypeVar("Model", bound=BaseModel)


def validate(
    root: type[Model], tree: Mapping[str, Any], origin: Mapping[str, str], source: str, see: str, under: str = ""
) -> tuple[Model | None, list[str]]:
    """A `root` with these plain values, and a line for each problem. With problems, the fields that have them are left out.

    `origin`: dotted field -> the file or the option that sets it; `source`: the same for all other fields; `see`: the reference for
    a user; `under`: the dotted section that `tree` is, with a dot at its end, where it is not the whole.
    """
    problems: list[str] = []
    left = dict(tree)
    bad: set[str] = set()
    # A wrong type keeps pydantic from checking its section as a whole: take the field out and validate again.
    while True:
        try:
            return root.model_validate(left), problems
        except ValidationError as error:
            details = error.errors()
            for detail in details:
                if not (names := _names(root, detail)) & bad:
                    problems.append(_line(root, detail, origin, source, see, under))
                bad |= names
            smaller = left
            for detail in details:
                smaller = _without(root, smaller, _known_fields(root, detail["loc"])[0])
            if smaller == left:
                return None, problems
            left = smaller


def where(field: str, origin: Mapping[str, str], source: str) -> str:
    """The file or option that sets a dotted field, or the nearest section around it."""
    parts = field.split(".")
    while parts:
        if (place := origin.get(".".join(parts).partition("[")[0])) is not None:
            return place
        parts.pop()
    return source


def _line(root: type[BaseModel], detail: Any, origin: Mapping[str, str], source: str, see: str, under: str) -> str:
    """A problem that pydantic found, on one line: file: field: value: what; remedy."""
    field = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        field = under + (f"{field}.{cause.field}" if field else cause.field)
        value = "" if cause.value is None else f" {cause.value!r}"
        return f"{where(field, origin, source)}: {field}:{value} {cause.what}; {cause.remedy}"
    parts, known = _known_fields(root, detail["loc"])
    field = under + ".".join(parts)
    place = where(field, origin, source)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5) or [
            f for f in everywhere(root) if f.rsplit(".", 1)[-1] == parts[-1] and "[" not in field
        ]
        there = f"fields here: {', '.join(known)}" if known else "there are none here"
        remedy = f'did you mean "{near[0]}"?' if near else there
        return f"{place}: {field}: unknown field; {remedy}"
    if detail["type"] == "missing":
        return f"{place}: {field}: is missing; add it"
    value = detail["input"]
    if detail["type"] == "literal_error":
        choices = [c.strip().strip("'\"") for c in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return f"{place}: {field}: unknown {value!r}; {registry.did_you_mean(str(value), choices)}"
    shown = repr(value) if len(repr(value)) < 60 else type(value).__name__
    if detail["type"] == "string_type" and isinstance(value, (int, float)):
        return f"{place}: {field}: {shown}: is no text for YAML; put it in quotes"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{place}: {field}: {shown}: {message}; see {see}"


def _known_fields(root: type[BaseModel], loc: Sequence[Any]) -> tuple[list[str], list[str]]:
    """A pydantic location without the names of union branches, and the fields that its section has; none for the key of a dict."""
    model: Any = root
    parts: list[str] = []
    known: list[str] = list(root.model_fields)
    info: Any = None
    for part in loc:
        if model is None:
            if info is not None and typing.get_origin(info.annotation) is dict:
                return [*parts, str(part)], []
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
    if typing.get_origin(annotation) in (list, tuple):
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


@cache
def sections(root: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    """The model itself and the models of all its sections, each once."""
    found: dict[type[BaseModel], None] = {root: None}
    for info in root.model_fields.values():
        if section := _section(info.annotation):
            found |= dict.fromkeys(sections(section))
    return tuple(found)


def _names(root: type[BaseModel], detail: Any) -> set[str]:
    """The names of the fields that a problem concerns, without their sections."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        return {cause.field, *cause.what.replace(",", " ").replace(":", " ").split()} & {
            f.rsplit(".", 1)[-1] for f in everywhere(root)
        }
    parts, known = _known_fields(root, detail["loc"])
    if not parts:
        return set()
    return {parts[-1] if known else ".".join(parts)}  # the key of a dict may have the name of a field


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


@dataclass(frozen=True, slots=True)
class Named:
    """An extension that a tree names. `field`: the dotted field that names it; `inside`: the dotted field of its options."""

    field: str
    kind: str
    name: str
    options: Mapping[str, Any]
    inside: str
    mark: Extension


def extensions(root: type[BaseModel], tree: Mapping[str, Any], origin: Mapping[str, str], source: str) -> list[str]:
    """A line for each extension that does not exist, and for each problem with the options of one that does.

    A built-in extension without `Options` takes none. An own one without `Options` takes any, and checks them itself.
    """
    problems: list[str] = []
    for each in named(root, tree):
        if each.name in each.mark.also:
            continue
        try:
            registry.check(each.kind, each.name)
            options = options_model(each.kind, each.name)
        except ExtensionNotFound as error:
            what = error.message.partition(": ")[2] if ":" in each.name else ""
            problem = f'unknown "{each.name}": {what}' if what else f'unknown "{each.name}"'
            problems.append(f"{where(each.field, origin, source)}: {each.field}: {problem}; {error.hint}")
            continue
        if each.mark.bare or (each.mark.flat and not registry.is_own(each.name)):
            continue
        if options is not None:
            problems += validate(options, each.options, origin, source, "docs/extending.md", f"{each.inside}.")[1]
        elif each.options and not registry.is_own(each.name):
            place = where(each.inside, origin, source)
            problems.append(
                f"{place}: {each.inside}: {', '.join(each.options)}: {each.name} has no options; remove them"
            )
    return problems


def options_model(kind: str, name: str) -> type[BaseModel] | None:
    """`Options` of an extension's file, read without importing it; None where it has none. Raises ExtensionNotFound."""
    found = registry.described(kind, name, "Options")
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def named(root: type[BaseModel], tree: Mapping[str, Any], prefix: str = "") -> Iterator[Named]:
    """The extensions that a tree of plain values names, those by default included where it gives them options."""
    for field, info in root.model_fields.items():
        value = tree.get(field)
        if (mark := next((m for m in info.metadata if isinstance(m, Extension)), None)) is not None:
            value = tree.get(field, info.default)
            options = None if mark.bare else tree.get("options")
            if isinstance(value, str):
                inside = f"{prefix}options"
                given = options if isinstance(options, Mapping) else {}
                yield Named(prefix + field, mark.kind, value, given, inside, mark)
        elif (section := _section(info.annotation)) is not None:
            several = value if isinstance(value, list) else [value]
            for i, one in enumerate(several):
                place = f"{prefix}{field}[{i}]." if isinstance(value, list) else f"{prefix}{field}."
                if isinstance(one, Mapping):
                    yield from named(section, one, place)
                elif isinstance(one, str) and (short := _names_extension(section)):
                    yield from named(section, {short: one}, place)


def _names_extension(section: type[BaseModel]) -> str | None:
    """The field of a section that names an extension, which may be given alone, as a string."""
    return next((f for f, i in section.model_fields.items() if any(isinstance(m, Extension) for m in i.metadata)), None)
