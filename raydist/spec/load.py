"""A job file, its parents and the overrides -> a JobSpec; or every problem at once, with file, field, value and remedy.

Runs anywhere.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from raydist import registry
from raydist.errors import ExtensionNotFound, SpecError
from raydist.spec.deepspeed import Converted, convert
from raydist.spec.models import JobSpec, flatten
from raydist.spec.parts import SpecValueError


class _Loader(yaml.SafeLoader):
    """YAML with floats as people write them (1e-4 too), and a repeated key refused rather than lost."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+(?:[eE][-+]?\d+)?)$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


@dataclass
class _Layer:
    """The fields of one file, or of the command line, and for each dotted one where it was written.

    `folder` is what a path in it is relative to.
    """

    tree: dict[str, Any]
    origin: dict[str, str]
    folder: Path = Path()


def _to_stderr(line: str) -> None:
    print(f"raydist: {line}", file=sys.stderr)


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    deepspeed: str | Path | None = None,
    warn: Callable[[str], None] = _to_stderr,
) -> JobSpec:
    """The job of a YAML file. `overrides` are `field.name=value`, the value in YAML; the last of a field wins.

    `deepspeed` is a DeepSpeed file that beats the job's files, but not `overrides`; a file's own `deepspeed:` beats what
    that file extends, but not its own fields. `warn` is told what in such a file has no counterpart.

    Raises SpecError with all that is wrong, one line each.
    """
    layers = _layers(Path(path))
    over = _Layer({} if deepspeed is None else {"deepspeed": str(deepspeed)}, {})
    problems: list[str] = []
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name:
            problems.append(f"--set {text}: no value; write --set optim.lr=3e-4")
            continue
        try:
            parsed = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError:
            problems.append(f"--set {text}: {value!r} is not YAML; quote it")
            continue
        override = _nest(name, parsed)
        over.origin |= dict.fromkeys(_paths(override), f"--set {name}")
        over.tree = merge(over.tree, override)
    if problems:
        raise SpecError("\n".join(problems))
    layers, converted = _with_deepspeed([*layers, over])
    tree, origin = _merged(layers)
    if converted is None:
        return parse(tree, origin, str(path))
    if converted.problems and isinstance(train := tree.setdefault("train", {}), dict) and "epochs" not in train:
        train.setdefault("steps", 10**9)  # what is wrong may have been their number: no second complaint
    try:
        spec = parse(tree, origin, str(path))
    except SpecError as error:
        raise SpecError("\n".join([*converted.problems, error.message])) from None
    if converted.problems:
        raise SpecError("\n".join(converted.problems))
    for line in converted.warnings():
        warn(line)
    return spec


def _with_deepspeed(layers: list[_Layer]) -> tuple[list[_Layer], Converted | None]:
    """The layers with the fields of the nearest `deepspeed:` right below those of the layer that names it."""
    naming = [i for i, layer in enumerate(layers) if "deepspeed" in layer.tree]
    if not naming:
        return layers, None
    at = naming[-1]
    name, origin = layers[at].tree["deepspeed"], layers[at].origin.get("deepspeed", "--deepspeed")
    left = [_Layer({k: v for k, v in x.tree.items() if k != "deepspeed"}, x.origin, x.folder) for x in layers]
    if name is None:
        return left, None
    if not isinstance(name, str):
        raise SpecError(f"{origin}: deepspeed: {name!r} is not a file name; write deepspeed: ds_config.json")
    around, nearer = flatten(_merged(left)[0]), flatten(_merged(left[at:])[0])
    converted = convert(layers[at].folder / name, around, nearer)
    # What is missing in a section that only the DeepSpeed file has is missing there.
    sections = dict.fromkeys(set(_paths(converted.tree)) - set(_merged(left[:at])[1]), converted.path)
    return [*left[:at], _Layer(converted.tree, sections | converted.origin()), *left[at:]], converted


def parse(tree: Mapping[str, Any], origin: Mapping[str, str] | None = None, source: str = "spec") -> JobSpec:
    """A JobSpec of plain values. `origin` says for each dotted field where it was written."""
    problems: list[str] = []
    if tree.get("deepspeed") is not None:
        problems.append(f"{source}: deepspeed: {tree['deepspeed']!r} cannot be read here; load the job from its file")
    spec = None
    left = dict(tree)
    bad: set[str] = set()
    # A wrong type hides the combinations of its section from pydantic: take the field out and look again.
    while spec is None:
        try:
            spec = JobSpec.model_validate(left)
        except ValidationError as error:
            details = error.errors()
            for detail in details:
                if not (names := _names(detail)) & bad:
                    problems.append(_line(detail, origin or {}, source))
                bad |= names
            smaller = left
            for detail in details:
                smaller = _without(smaller, _known_fields(detail["loc"])[0])
            if smaller == left:
                break
            left = smaller
    problems += _unresolved(tree, origin or {}, source)
    if problems or spec is None:
        raise SpecError("\n".join(dict.fromkeys(problems)))
    return spec


def read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged values of a file and the files it extends, and for each dotted field the file that set it."""
    return _merged(_layers(path))


def _merged(layers: Sequence[_Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer in layers:
        tree, origin = merge(tree, layer.tree), origin | layer.origin
    return tree, origin


def _layers(path: Path, seen: tuple[Path, ...] = ()) -> list[_Layer]:
    """A file and the files it extends, the farthest first."""
    if path.resolve() in seen:
        raise SpecError(f"{path}: extends: goes round in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    tree = read_yaml(path, f" (extended by {seen[-1]})" if seen else "")
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: holds {type(tree).__name__}, not fields; begin with name: and model:")
    parent = tree.pop("extends", None)
    own = _Layer(tree, dict.fromkeys(_paths(tree), str(path)), path.parent)
    if parent is None:
        return [own]
    if not isinstance(parent, str):
        raise SpecError(f"{path}: extends: {parent!r} is not a file name; write extends: base.yaml")
    return [*_layers(path.parent / parent, (*seen, path.resolve())), own]


def read_yaml(path: Path, by: str = "", examples: str = "jobs/ has examples") -> Any:
    """What a YAML file holds. `by`: who wants it, and `examples` where such files are, for the errors. Raises SpecError."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f'did you mean "{path.parent / near[0]}"?' if near else f"check the path; {examples}"
        raise SpecError(f"{path}: no such file{by}; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


SHORT_NAMES = {"precision": "params", "schedule": "name"}
"""Section that may be given by a name alone -> its field of that name."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top: dicts merge, all else replaces. A short name over a section starts it anew."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if key in SHORT_NAMES and isinstance(old, str):
            old = {SHORT_NAMES[key]: old}  # `precision: bf16` keeps its bf16 under `precision: {reduce: fp32}`
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    # `data.source` and `data.path`, `train.steps` and `train.epochs` exclude one another: the nearer one wins.
    for one, other in (("source", "path"), ("steps", "epochs")):
        for kept, dropped in ((one, other), (other, one)):
            if over.get(kept) is not None and over.get(dropped) is None and kept in over:
                merged.pop(dropped, None)
    return merged


def dump(spec: JobSpec) -> str:
    """The resolved spec as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def spec_hash(spec: JobSpec) -> str:
    """sha256 (hex) of the resolved spec."""
    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _nest(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return typing.cast("dict[str, Any]", value)


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{key}.")
    return found


def _where(field: str, origin: Mapping[str, str], source: str) -> str:
    parts = field.split(".")
    while parts:
        if (place := origin.get(".".join(parts).partition("[")[0])) is not None:
            return place
        parts.pop()
    return source


def _line(detail: Any, origin: Mapping[str, str], source: str) -> str:
    """One problem, as pydantic found it, on one line: file: field: value: what; remedy."""
    field = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("function-"))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        field = f"{field}.{cause.field}" if field else cause.field
        value = "" if cause.value is None else f" {cause.value!r}"
        return f"{_where(field, origin, source)}: {field}:{value} {cause.what}; {cause.remedy}"
    parts, known = _known_fields(detail["loc"])
    field = ".".join(parts)
    place = _where(field, origin, source)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5) or [
            f for f in _everywhere() if f.rsplit(".", 1)[-1] == parts[-1] and "[" not in field
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
    return f"{place}: {field}: {shown}: {message}; see `raydist schema` or docs/spec.md"


def _known_fields(loc: Sequence[Any]) -> tuple[list[str], list[str]]:
    """A pydantic location without the names of union branches, and the fields that its section has."""
    model: Any = JobSpec
    parts: list[str] = []
    known: list[str] = list(JobSpec.model_fields)
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


def _everywhere() -> list[str]:
    """The dotted names of all fields."""

    def walk(model: type[BaseModel], prefix: str) -> list[str]:
        found: list[str] = []
        for name, info in model.model_fields.items():
            found.append(prefix + name)
            if section := _section(info.annotation):
                found += walk(section, f"{prefix}{name}.")
        return found

    return walk(JobSpec, "")


def _names(detail: Any) -> set[str]:
    """The fields that a problem is about, without their sections."""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SpecValueError):
        return {cause.field, *cause.what.replace(",", " ").replace(":", " ").split()} & {
            f.rsplit(".", 1)[-1] for f in _everywhere()
        }
    return {_known_fields(detail["loc"])[0][-1]} if detail["loc"] else set()


def _without(tree: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """A copy of `tree` that lacks the field at `parts`."""
    if not parts or parts[0] not in tree:
        return tree
    copy = dict(tree)
    if len(parts) > 1 and isinstance(copy[parts[0]], dict):
        copy[parts[0]] = _without(copy[parts[0]], parts[1:])
    elif (len(parts) == 1 and parts[0] not in JobSpec.model_fields) or not isinstance(copy[parts[0]], dict):
        del copy[parts[0]]
    return copy


def _unresolved(tree: Mapping[str, Any], origin: Mapping[str, str], source: str) -> list[str]:
    """Names of extensions that nothing answers to."""
    values = flatten(dict(tree))
    problems = []
    named = [
        ("model", "model.name", values.get("model.name")),
        ("parallel", "parallel.strategy", values.get("parallel.strategy")),
    ]
    exporters = values.get("observe.exporters")
    for each in exporters if isinstance(exporters, list) else []:
        named.append(("exporter", "observe.exporters", each.get("name") if isinstance(each, dict) else each))
    for kind, field, name in named:
        if isinstance(name, str):
            try:
                registry.check(kind, name)
            except ExtensionNotFound as error:
                problems.append(f'{_where(field, origin, source)}: {field}: unknown "{name}"; {error.hint}')
    return problems
