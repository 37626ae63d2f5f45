"""Writes the references of jobs and sweeps from the models of raydist/spec, and the tables of docs/observe.md: `make docs`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from raydist.cli.schema import job_schema, sweep_schema
from raydist.run import telemetry_schema
from raydist.spec.sweep.names import SHORT

HERE = Path(__file__).parent


def kind(prop: dict[str, Any], defs: dict[str, Any]) -> str:
    """A field's type in words."""
    if "anyOf" in prop:
        return " or ".join(dict.fromkeys(kind(p, defs) for p in prop["anyOf"]))
    if "enum" in prop:
        return ", ".join(f"`{v}`" for v in prop["enum"])
    if "const" in prop:
        return f"`{prop['const']}`"
    if "$ref" in prop:
        return "the fields below"
    words = {"number": "number", "integer": "whole number", "boolean": "true or false", "string": "text", "null": "null",
             "array": "list", "object": "fields"}  # fmt: skip
    limits = [
        f"{sign} {prop[key]:g}"
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if key in prop and abs(prop[key]) < 2**53
    ]
    return words[prop["type"]] + (f" {', '.join(limits)}" if limits else "")


def said(prop: dict[str, Any], defs: dict[str, Any]) -> str:
    """A field's help; pydantic leaves it to the section where both say the same."""
    ref = _ref(prop)
    return str(prop.get("description") or defs[ref or ""]["description"])


def rows(section: dict[str, Any], prefix: str, defs: dict[str, Any]) -> list[str]:
    """One line of the table a field, sub-sections after their own line."""
    lines = []
    for name, prop in section["properties"].items():
        default = json.dumps(prop["default"]) if "default" in prop else ""
        lines.append(
            f"| `{prefix}{name}` | {kind(prop, defs)} | {f'`{default}`' if default else ''} | {said(prop, defs)} |"
        )
        inside, dot = (prop["items"], "[].") if "anyOf" in prop.get("items", {}) else (prop, ".")
        refs = [p["$ref"] for p in (inside, *inside.get("anyOf", [])) if "$ref" in p]
        for ref in refs:
            lines += rows(defs[ref.rsplit("/", 1)[-1]], f"{prefix}{name}{dot}", defs)
    return lines


def reference() -> str:
    """docs/spec.md."""
    head = [
        "# The job file",
        "",
        "Written by `make docs` from the models in raydist/spec; `raydist schema` prints the same as JSON Schema. A file may say",
        "`extends: other.yaml` (deep merge, the nearer file wins, lists replace), and `--set field=value` overrides any field.",
        "Begin a file with `# yaml-language-server: $schema=PATH/docs/spec.schema.json`, and editors complete and check it.",
    ]
    return "\n".join(head + tables(job_schema())) + "\n"


def sweep_reference() -> str:
    """docs/sweep-spec.md."""
    head = [
        "# The sweep's file",
        "",
        "Written by `make docs` from the models in raydist/spec/sweep; `raydist schema --sweep` prints the same as JSON Schema.",
        "docs/sweeps.md says how cells are made and told. Begin a file with",
        "`# yaml-language-server: $schema=PATH/docs/sweep-spec.schema.json`, and editors complete and check it.",
    ]
    names = ["", "## Short names", "", "Any other field of a job goes by its dotted name (docs/spec.md).", "",
             "| name | field |", "|---|---|", *(f"| `{name}` | `{field}` |" for name, field in SHORT.items())]  # fmt: skip
    return "\n".join(head + tables(sweep_schema()) + names) + "\n"


def tables(schema: dict[str, Any]) -> list[str]:
    """The fields of a whole file, section by section."""
    defs = schema["$defs"]
    text: list[str] = []
    table = ["", "| field | value | default | what it does |", "|---|---|---|---|"]
    top = {"properties": {k: v for k, v in schema["properties"].items() if not _ref(v)}}
    text += [*table, *rows(top, "", defs)]
    for name, prop in schema["properties"].items():
        if ref := _ref(prop):
            text += ["", f"## {name}", "", said(prop, defs), *table, *rows(defs[ref], f"{name}.", defs)]
    return text


def with_columns(page: str) -> str:
    """A page with the tables between `<!-- columns: NAME -->` and `<!-- end -->` made anew from raydist/run/telemetry_schema.py."""

    def table(found: re.Match[str]) -> str:
        columns = getattr(telemetry_schema, found[1])
        lines = [f"| `{name}` | {kind} | {text} |" for name, (kind, text) in columns.items()]
        return "\n".join(
            [f"<!-- columns: {found[1]} -->", "| column | type | meaning |", "|---|---|---|", *lines, "<!-- end -->"]
        )

    return re.sub(r"<!-- columns: (\w+) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


def _ref(prop: dict[str, Any]) -> str | None:
    refs = [p["$ref"] for p in (prop, *prop.get("anyOf", [])) if "$ref" in p]
    return refs[0].rsplit("/", 1)[-1] if refs else None


if __name__ == "__main__":
    (HERE / "spec.schema.json").write_text(json.dumps(job_schema(), indent=1) + "\n")
    (HERE / "spec.md").write_text(reference())
    (HERE / "sweep-spec.schema.json").write_text(json.dumps(sweep_schema(), indent=1) + "\n")
    (HERE / "sweep-spec.md").write_text(sweep_reference())
    observe = HERE / "observe.md"
    observe.write_text(with_columns(observe.read_text()))
