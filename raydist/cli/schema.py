"""`raydist schema`: the JSON Schema of a job file or a sweep file, for editors.

Runs in: the user's shell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel


def schema(
    job: Annotated[
        Path | None,
        typer.Argument(help="A job file. The schema also has the options of its own extensions.", show_default=False),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="The schema of a sweep file.")] = False,
) -> None:
    """Print the JSON Schema of a job file, for completion and checks in editors."""
    print(json.dumps(sweep_schema() if sweep else job_schema(_own_extensions(job)), indent=2))


def job_schema(own: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
    """The schema of a job file: JobSpec with `extends`, and without required fields. It includes the options of every built-in
    extension, and of the user's extensions in `own`: (kind, name) each."""
    from raydist.spec import JobSpec

    made = JobSpec.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "raydist job"
    made["properties"] = {
        "extends": {
            "type": "string",
            "description": "A job file that this one builds on; deep merge, the nearer file wins.",
        },
        **made["properties"],
    }
    # The extended file may set the required fields: their presence is checked after merging.
    made.pop("required", None)
    for definition in made["$defs"].values():
        definition.pop("required", None)
    for field, short in (("precision", ["fp32", "bf16", "fp16"]), ("schedule", None)):
        _allow_short_name(made, field, short)
    _allow_short_extension(made, "TrainSpec", "loss")
    exporters = made["$defs"]["ObserveSpec"]["properties"]["exporters"]
    exporters |= {"items": {"anyOf": [{"type": "string"}, exporters["items"]]}, "default": ["tensorboard"]}
    hooks = made["properties"]["hooks"]
    hooks |= {"items": {"anyOf": [{"type": "string"}, hooks["items"]]}}
    _add_options(made, JobSpec, list(own))
    return made


def sweep_schema() -> dict[str, Any]:
    """The schema of a sweep's file: SweepSpec, with the names of the parameters."""
    from raydist.spec.models import JobSpec
    from raydist.spec.sweep.models import SweepSpec
    from raydist.spec.sweep.names import FREE, OWN, SHORT
    from raydist.spec.validate import everywhere

    made = SweepSpec.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "raydist sweep"
    for name in ("scheduler", "search"):
        section = made["$defs"][made["properties"][name].pop("$ref").rsplit("/", 1)[-1]]
        names = next((p["enum"] for p in section["properties"]["name"].get("anyOf", []) if "enum" in p), None)
        names = names or section["properties"]["name"]["enum"]
        made["properties"][name].setdefault("description", section["description"])
        own = [{"type": "string", "pattern": ":"}] if name == "scheduler" else []
        made["properties"][name]["anyOf"] = [{"enum": names}, *own, {"$ref": f"#/$defs/{name.capitalize()}Spec"}]
    known = {name: {"description": field} for name, field in SHORT.items()}
    known |= {name: {} for name in everywhere(JobSpec) if name not in (*OWN, *SHORT)}
    entry = {
        "type": "object",
        "properties": known,
        "patternProperties": {rf"^({'|'.join(re.escape(section.rstrip('.')) for section in FREE)})\..": {}},
        "additionalProperties": False,
    }
    parameters = made["$defs"]["ArraySpec"]["properties"]["parameters"]
    for key in ("items", "type", "minItems"):
        parameters.pop(key, None)
    parameters["anyOf"] = [{"type": "array", "items": entry, "minItems": 1}, {**entry, "minProperties": 1}]
    return made


def _allow_short_name(made: dict[str, Any], field: str, names: list[str] | None) -> None:
    for holder in (made, *made["$defs"].values()):
        prop = holder.get("properties", {}).get(field)
        if prop and "$ref" in prop:
            section = made["$defs"][prop["$ref"].rsplit("/", 1)[-1]]
            names = names or section["properties"]["name"]["enum"]
            ref = prop.pop("$ref")
            prop["anyOf"] = [{"enum": names}, {"$ref": ref}]


def _allow_short_extension(made: dict[str, Any], holder: str, field: str) -> None:
    """Lets a section be given by the name of its extension alone."""
    prop = made["$defs"][holder]["properties"][field]
    ref = prop.pop("$ref")
    prop["anyOf"] = [{"type": "string"}, {"$ref": ref}]
    prop["default"] = made["$defs"][ref.rsplit("/", 1)[-1]]["properties"]["name"]["default"]


def _own_extensions(job: Path | None) -> list[tuple[str, str]]:
    """(kind, name) of the user's own extensions that a job file names."""
    from raydist.registry import is_own
    from raydist.spec import JobSpec, read_tree
    from raydist.spec.validate import named

    tree = {} if job is None else read_tree(job)[0]
    return [(each.kind, each.name) for each in named(JobSpec, tree) if is_own(each.name)]


def _add_options(made: dict[str, Any], root: type[BaseModel], own: list[tuple[str, str]]) -> None:
    """Adds the schema of each extension's options to the section that names it, as `if` the name, `then` these options."""
    from raydist.spec.parts import Extension
    from raydist.spec.validate import options_model, sections

    for section in sections(root):
        definition = made["$defs"].get(section.__name__)
        if definition is None or "options" not in section.model_fields:
            continue
        for field, info in section.model_fields.items():
            for mark in (m for m in info.metadata if isinstance(m, Extension) and not m.bare):
                names = mark.names() + [name for kind, name in own if kind == mark.kind]
                with_options = {name: found for name in names if (found := options_model(mark.kind, name))}
                none = [name for name in mark.names() if name not in with_options]
                rules: list[tuple[dict[str, Any], dict[str, Any]]] = (
                    [({"enum": none}, {"maxProperties": 0})] if none else []
                )
                for name, model in with_options.items():
                    title = f"{mark.kind.capitalize()}{name.partition(':')[0].capitalize()}Options"
                    schema = model.model_json_schema(ref_template="#/$defs/{model}")
                    made["$defs"] |= schema.pop("$defs", {})
                    made["$defs"][title] = {**schema, "title": title}
                    rules.append(({"const": name}, {"$ref": f"#/$defs/{title}"}))
                conditions = [
                    {
                        "if": {"properties": {field: named}, "required": [field]},
                        "then": {"properties": {"options": then}},
                    }
                    for named, then in rules
                ]
                if conditions:
                    definition["allOf"] = conditions
