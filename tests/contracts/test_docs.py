"""No extension without its section in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raydist import registry

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in registry.FOLDERS for n in registry.names(k)])
def test_every_extension_has_a_section(kind: str, name: str) -> None:
    """docs/extending.md has a heading for each file in each folder of extensions."""
    assert re.search(rf"^### {name}$", (DOCS / "extending.md").read_text(), re.MULTILINE), f"{kind} {name}"
