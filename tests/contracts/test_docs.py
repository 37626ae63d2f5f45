"""No extension without its section in the docs, and no column without its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raydist import registry
from raydist.run import telemetry_schema

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in registry.FOLDERS for n in registry.names(k)])
def test_every_extension_has_a_section(kind: str, name: str) -> None:
    """docs/extending.md has a heading for each file in each folder of extensions."""
    assert re.search(rf"^### {name}$", (DOCS / "extending.md").read_text(), re.MULTILINE), f"{kind} {name}"


@pytest.mark.parametrize("rows", ["WHO", "RANK", "NODE", "GPU"])
def test_every_column_has_a_line(rows: str) -> None:
    """docs/observe.md has the tables of raydist/run/telemetry_schema.py, as they are now (`make docs`)."""
    found = re.search(rf"<!-- columns: {rows} -->(.*?)<!-- end -->", (DOCS / "observe.md").read_text(), re.DOTALL)
    assert found is not None
    columns = getattr(telemetry_schema, rows)
    assert re.findall(r"^\| `(\w+)` \| \w+ \| (.*) \|$", found[1], re.MULTILINE) == [
        (n, t) for n, (_, t) in columns.items()
    ]
