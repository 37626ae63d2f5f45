"""A job file, the files it extends and the overrides -> a JobSpec; or every problem at once, with file, field, value and remedy.

Runs anywhere.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raydist.errors import SpecError, UserError
from raydist.parsing import JOB_BYTES, NAME, JobLoader, parse_yaml, quoted, read_text
from raydist.redact import redact, remember
from raydist.run.directory import SPEC
from raydist.spec.deepspeed import Converted, convert
from raydist.spec.huggingface import read_folder
from raydist.spec.models import JobSpec, flatten
from raydist.spec.validate import extensions, validate
from raydist.storage import Storage


@dataclass
class Layer:
    """The fields of one file, of the command line or of a sweep's cell, and for each dotted field the file or option that sets it.

    Paths in it are relative to `folder`.
    """

    tree: dict[str, Any]
    origin: dict[str, str]
    folder: Path = Path()
    extends: tuple[str, str] | None = None
    """A file, and the name of the file that it extends."""

    def with_field(self, name: str, value: Any, place: str) -> Layer:
        """This layer with one more dotted field, set at `place`."""
        over = nest(name, value)
        return Layer(merge(self.tree, over), {**self.origin, **dict.fromkeys(_paths(over), place)}, self.folder)


def _to_stderr(line: str) -> None:
    print(f"raydist: {line}", file=sys.stderr)


Job = str | Path | Mapping[str, Any] | JobSpec
"""A YAML file, or its content: fields, whose paths are relative to the working directory, or a spec."""
Overrides = Sequence[str] | Mapping[str, Any]
"""What is set over a job's files: `field.name=value` each, the value in YAML; or dotted field -> value."""


def load(
    job: Job,
    overrides: Overrides = (),
    deepspeed: str | Path | None = None,
    warn: Callable[[str], None] = _to_stderr,
) -> JobSpec:
    """The job of a YAML file, or of its content. Of several `overrides` of a field the last wins.

    `deepspeed` is a DeepSpeed file. Its fields win over the job's files, but not over `overrides`; those of a file's own
    `deepspeed:` win over the files that it extends, but not over its own fields. `warn` gets a line for each field of a DeepSpeed
    file that has no counterpart.

    Raises SpecError with all problems, one line each.
    """
    over = overriding(overrides)
    if deepspeed is not None:
        over.tree.setdefault("deepspeed", str(deepspeed))
    if isinstance(job, str | Path):
        layers = read_job(Path(job))
    elif not isinstance(job, Mapping | JobSpec):
        raise SpecError(
            f"{source_of(job)}: {quoted(repr(job))} is not a job; give a YAML file, its fields as a dict, or a JobSpec"
        )
    else:
        layers = layers_of(job.model_dump(mode="json") if isinstance(job, JobSpec) else job, source_of(job))
    return resolve([*layers, over], source_of(job), warn)


def source_of(job: Job) -> str:
    """The place of fields that no layer sets."""
    return str(job) if isinstance(job, str | Path) else "spec"


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Within it a UserError about a job names the job's source, as those of its fields do."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{source}: {error.message}", error.hint) from error


def read_job(path: Path) -> list[Layer]:
    """The layers of a job file: `read_layers`. Raises SpecError, also for a sweep."""
    layers = read_layers(path)
    if {"base", "array"} <= layers[-1].tree.keys():
        raise SpecError(f"{path}: is a sweep, not a job; train it with `raydist sweep {path}`")
    return layers


def overriding(overrides: Overrides) -> Layer:
    """The layer of the `--set` options, or of fields with their values. Raises SpecError with all problems."""
    over = Layer({}, {})
    problems: list[str] = []
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            over = over.with_field(str(name), value, f"set {name}")
        return over
    if isinstance(overrides, str):
        raise SpecError(f"set: {quoted(overrides)!r} is text; write set={{'optim.lr': 3e-4}}")
    if not isinstance(overrides, Sequence) or not all(isinstance(text, str) for text in overrides):
        raise SpecError(f"set: {quoted(repr(overrides))} is no dict; write set={{'optim.lr': 3e-4}}")
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not name:
            problems.append(f"--set {quoted(text)}: no value; write --set optim.lr=3e-4")
            continue
        try:
            parsed = parse_yaml(value, JobLoader)
        except (yaml.YAMLError, ValueError) as error:
            why = "is not YAML" if isinstance(error, yaml.YAMLError) else f"cannot be read: {error}"
            problems.append(f"--set {quoted(text)}: {quoted(value)!r} {why}; quote it")
            continue
        if lost := _lost(value):
            problems.append(f"--set {quoted(text)}: {quoted(value)!r} {lost}; quote it")
            continue
        over = over.with_field(name, parsed, f"--set {name}")
    if problems:
        raise SpecError("\n".join(problems))
    return over


def _lost(text: str) -> str | None:
    """Why YAML reads only a part of the text of a `--set`; None if it reads all."""
    if text.lstrip().startswith("&"):
        return "begins with &, which names a value in YAML"
    if "#" not in text:
        return None
    end = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if "#" in text[end : token.start_mark.index]:
            return "has a #, which begins a comment in YAML"
        end = max(end, token.end_mark.index)
    return None


def resolve(layers: Sequence[Layer], source: str, warn: Callable[[str], None] = _to_stderr) -> JobSpec:
    """The job of these layers; the last one wins. `source` is the place of fields that no layer sets. Raises SpecError with all
    problems."""
    layers, converted = _with_deepspeed(_with_pretrained(list(layers)))
    tree, origin = merged(layers)
    if converted is None:
        return parse(tree, origin, source)
    if converted.problems and isinstance(train := tree.setdefault("train", {}), dict) and "epochs" not in train:
        train.setdefault("steps", 10**9)  # the number of steps may be the problem: report it once
    try:
        spec = parse(tree, origin, source)
    except SpecError as error:
        raise SpecError("\n".join([*converted.problems, error.message])) from None
    if converted.problems:
        raise SpecError("\n".join(converted.problems))
    for line in converted.warnings():
        warn(line)
    return spec


def _with_pretrained(layers: list[Layer]) -> list[Layer]:
    """The layers, with the fields of the config.json of the last `model.hf` as a layer right before the one that names it."""
    naming = [i for i, x in enumerate(layers) if isinstance(model := x.tree.get("model"), dict) and model.get("hf")]
    if not naming:
        return layers
    at = naming[-1]
    layer = layers[at]
    hf, origin = layer.tree["model"]["hf"], layer.origin.get("model.hf", "model")
    try:
        name, fields = read_folder(str(hf))
    except UserError as error:
        raise SpecError(f"{origin}: model.hf: {error.message}; {error.hint}") from None
    named = next(
        (m for x in reversed(layers[at:]) if (m := x.tree["model"].get("name") if "model" in x.tree else None)), None
    )
    if named not in (None, fields["name"]):
        raise SpecError(f"{origin}: model.name: {named}: {name} has a {fields['name']}; leave name out")
    own = layer.with_field("model.hf", name, origin)
    config = Layer({"model": fields}, dict.fromkeys(_paths({"model": fields}), f"{name}/config.json"))
    return [*layers[:at], config, Layer(own.tree, layer.origin, layer.folder, layer.extends), *layers[at + 1 :]]


def _with_deepspeed(layers: list[Layer]) -> tuple[list[Layer], Converted | None]:
    """The layers, with the fields of the last `deepspeed:` as a layer right before the one that names it."""
    naming = [i for i, layer in enumerate(layers) if "deepspeed" in layer.tree]
    if not naming:
        return layers, None
    at = naming[-1]
    name, origin = layers[at].tree["deepspeed"], layers[at].origin.get("deepspeed", "--deepspeed")
    left = [Layer({k: v for k, v in x.tree.items() if k != "deepspeed"}, x.origin, x.folder) for x in layers]
    if name is None:
        return left, None
    if not isinstance(name, str):
        raise SpecError(f"{origin}: deepspeed: {name!r} is not a file name; write deepspeed: ds_config.json")
    around, nearer = flatten(merged(left)[0]), flatten(merged(left[at:])[0])
    converted = convert(layers[at].folder / name, around, nearer)
    # A missing field of a section that only the DeepSpeed file has is reported for that file.
    sections = dict.fromkeys(set(_paths(converted.tree)) - set(merged(left[:at])[1]), converted.path)
    return [*left[:at], Layer(converted.tree, sections | converted.origin()), *left[at:]], converted


def parse(tree: Mapping[str, Any], origin: Mapping[str, str] | None = None, source: str = "spec") -> JobSpec:
    """A JobSpec of plain values. `origin`: dotted field -> the file or option that sets it. Raises SpecError with all problems."""
    problems: list[str] = []
    if tree.get("deepspeed") is not None:
        problems.append(f"{source}: deepspeed: {tree['deepspeed']!r} cannot be read here; load the job from its file")
    spec, wrong = validate(JobSpec, tree, origin or {}, source, "`raydist schema` or docs/reference/spec.md")
    problems += [*wrong, *extensions(JobSpec, tree, origin or {}, source)]
    if problems or spec is None:
        raise SpecError("\n".join(dict.fromkeys(problems)))
    remember(spec.cluster.env)
    return spec


def read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged values of a file and the files it extends, and for each dotted field the file that set it."""
    return merged(read_layers(path))


def merged(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of all layers, where the last one wins, and for each dotted field the file or option that sets it."""
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer in layers:
        tree, origin = merge(tree, layer.tree), origin | layer.origin
    return tree, origin


EXTENDS = 20
"""Files in a chain of `extends`."""


def read_layers(path: Path, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """A file and the files it extends, the file itself last."""
    if len(seen) > EXTENDS:
        raise SpecError(
            f"{quoted(seen[0])}: extends: a chain of more than {EXTENDS} files, the limit; join some of them"
        )
    if path.resolve() in seen:
        raise SpecError(f"{path}: extends: goes round in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    tree = read_yaml(path, f" (extended by {seen[-1]})" if seen else "")
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: holds {type(tree).__name__}, not fields; begin with name: and model:")
    return layers_of(tree, str(path), path.parent, (*seen, path.resolve()))


def layers_of(tree: Mapping[str, Any], place: str, folder: Path = Path(), seen: tuple[Path, ...] = ()) -> list[Layer]:
    """The fields that stand at `place`, whose paths are relative to `folder`, after those of the files that they extend."""
    tree = dict(tree)
    if wrong := [key for key in tree if not isinstance(key, str)]:
        raise SpecError(
            f"{place}: {quoted(repr(wrong[0]))} is not the name of a field; write it as text, as in 'train'"
        )
    parent = tree.pop("extends", None)
    own = Layer(tree, dict.fromkeys(_paths(tree), place), folder)
    if parent is None:
        return [own]
    if not isinstance(parent, str):
        raise SpecError(f"{place}: extends: {parent!r:.{NAME}} is not a file name; write extends: base.yaml")
    if "\0" in parent:
        raise SpecError(f"{place}: extends: {parent!r:.{NAME}} has a NUL character; write extends: base.yaml")
    own.extends = place, parent
    return [*read_layers(folder / parent, seen), own]


def named_files(layers: Sequence[Layer]) -> list[tuple[str, str, Path]]:
    """The files that layers name: (file and field that name it, the name, the folder that the name is relative to)."""
    found = [(f"{x.extends[0]}: extends", x.extends[1], x.folder) for x in reversed(layers) if x.extends is not None]
    configured = next((x for x in reversed(layers) if "deepspeed" in x.tree), None)
    if configured is not None and isinstance(name := configured.tree["deepspeed"], str):
        found.append((f"{configured.origin['deepspeed']}: deepspeed", name, configured.folder))
    return found


def read_yaml(path: Path, by: str = "", examples: str = "`raydist init` writes examples") -> Any:
    """The content of a YAML file. `by`: the file that names it; `examples`: where to find some. Raises SpecError."""
    if path.suffix == ".py":
        raise SpecError(f"{path}: is a Python script{by}; `raydist run {path}` trains with one")
    try:
        return parse_yaml(read_text(path, JOB_BYTES), JobLoader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1)
        hint = f'did you mean "{path.parent / near[0]}"?' if near else f"check the path; {examples}"
        raise SpecError(f"{quoted(path)}: no such file{by}; {hint}") from None
    except OSError as error:
        raise SpecError(f"{quoted(path)}: cannot be read: {error.strerror}{by}; check the path") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: cannot be read: {error}; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise SpecError(f"{quoted(path)}: cannot be read: {error}{by}; give a smaller or simpler file") from None


SHORT_NAMES = {"precision": "params", "schedule": "name", "loss": "name"}
"""Section that may be given as a single string -> the field that the string sets."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`: dicts merge, everything else is replaced. A single string for a section replaces it."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if key in SHORT_NAMES and isinstance(old, str):
            old = {SHORT_NAMES[key]: old}  # `precision: bf16` keeps its bf16 under `precision: {reduce: fp32}`
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    # `data.source` and `data.path`, `train.steps` and `train.epochs` exclude one another: the one in `over` wins.
    for one, other in (("source", "path"), ("steps", "epochs")):
        for kept, dropped in ((one, other), (other, one)):
            if over.get(kept) is not None and over.get(dropped) is None and kept in over:
                merged.pop(dropped, None)
    return merged


def read_stored(folder: Storage, name: str = SPEC) -> JobSpec:
    """The job of a run's spec.yaml, or of a sweep's base.yaml; reads no other file, whatever it names.

    Raises SpecError, FileNotFoundError, StorageError.
    """
    source = f"{folder.uri}/{name}"
    try:
        tree = parse_yaml(folder.read(name))
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{source}: is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise SpecError(f"{source}: is damaged: holds {type(tree).__name__}, not fields")
    if "extends" in tree:
        raise SpecError(
            f"{source}: extends: is for job files; a run's spec has all fields: this one was changed, restore it"
        )
    return parse(tree, source=source)


def dump(spec: JobSpec) -> str:
    """The resolved spec as YAML; `load` reads an equal one from it."""
    return _yaml(spec.model_dump(mode="json"))


def _yaml(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def stored(spec: JobSpec) -> str:
    """`dump` for a file that others may read: without secrets, in URIs and in variables. The user's command has to give these
    again.
    """
    return _yaml(redact(spec.model_dump(mode="json")))


def spec_hash(spec: JobSpec) -> str:
    """sha256 (hex) of the resolved spec."""
    return hashlib.sha256(json.dumps(spec.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def nest(name: str, value: Any) -> dict[str, Any]:
    """The tree of a file that sets one dotted field."""
    *sections, field = name.split(".")
    tree = {field: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{key}.")
    return found
