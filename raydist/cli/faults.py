"""`raydist faults`: lists the faults that `raydist train --faults FILE` can inject.

Runs in: the user's shell. Never imports ray or torch.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer


def faults(
    as_json: Annotated[bool, typer.Option("--json", help="JSON Schemas by name.")] = False,
) -> None:
    """List the faults that can be injected into a run, with their fields."""
    from raydist.faults import KINDS, fields, summary

    if as_json:
        print(json.dumps({name: kind.model_json_schema() for name, kind in KINDS.items()}))
        return
    for name, kind in KINDS.items():
        print(f"{name}: {summary(kind)}")
        for field, description in fields(kind).items():
            print(f"    {field}: {description}")
