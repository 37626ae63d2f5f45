"""`raydist schema`: the JSON Schema of a job file, or of a sweep's, for editors.

Runs in: the user's shell.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(schema)


def schema(sweep: Annotated[bool, typer.Option("--sweep", help="Of a sweep's file.")] = False) -> None:
    """Print the JSON Schema of a job file; editors complete and check with it."""
    print(json.dumps(sweep_schema() if sweep else job_schema(), indent=2))


def job_schema() -> dict[str, Any]:
    """The schema of what a file may say: as JobSpec, with `extends`, and nothing required of a part of a whole."""
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
    # What the file it extends says need not be said again: presence is checked when the whole is loaded.
    made.pop("required", None)
    for definition in made["$defs"].values():
        definition.pop("required", None)
    for field, short in (("precision", ["fp32", "bf16", "fp16"]), ("schedule", None)):
        _allow_short_name(made, field, short)
    exporters = made["$defs"]["ObserveSpec"]["properties"]["exporters"]
    exporters |= {"items": {"anyOf": [{"type": "string"}, exporters["items"]]}, "default": ["tensorboard"]}
    return made


def sweep_schema() -> dict[str, Any]:
    """The schema of a sweep's file: as SweepSpec, with the names that parameters may have."""
    from raydist.spec.models import JobSpec
    from raydist.spec.sweep.models import SweepSpec
    from raydist.spec.sweep.names import OWN, SHORT
    from raydist.spec.validate import everywhere

    made = SweepSpec.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "raydist sweep"
    for name in ("scheduler", "search"):
        section = made["$defs"][made["properties"][name].pop("$ref").rsplit("/", 1)[-1]]
        names = next((p["enum"] for p in section["properties"]["name"].get("anyOf", []) if "enum" in p), None)
        names = names or section["properties"]["name"]["enum"]
        made["properties"][name].setdefault("description", section["description"])
        made["properties"][name]["anyOf"] = [{"enum": names}, {"$ref": f"#/$defs/{name.capitalize()}Spec"}]
    known = {name: {"description": field} for name, field in SHORT.items()}
    known |= {name: {} for name in everywhere(JobSpec) if name not in (*OWN, *SHORT)}
    entry = {
        "type": "object",
        "properties": known,
        "patternProperties": {r"^(model\.options|cluster\.env)\..": {}},
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
