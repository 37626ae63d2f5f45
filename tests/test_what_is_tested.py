"""docs/explanation/what-is-tested.md names existing tests for each promise and for every kind of fault."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from raydist.faults import KINDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/explanation/what-is-tested.md").read_text(encoding="utf-8")
NAMED = re.compile(r"tests/[\w/]+\.py(?:::(\w+))?")
PROMISES = 8


def named(text: str) -> list[str]:
    """Each file::test that the text names."""
    return [found[0] for found in NAMED.finditer(text) if found[1]]


def test_each_test_that_is_named_exists() -> None:
    """The file has a top-level function of that name."""
    missing = []
    for name in named(PAGE):
        file, _, test = name.partition("::")
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        if test not in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]:
            missing.append(name)
    assert missing == []
    assert all((ROOT / found[0].partition("::")[0]).exists() for found in NAMED.finditer(PAGE))


def test_every_promise_has_its_tests() -> None:
    """Promises are numbered from 1 to PROMISES, with at least three tests each."""
    parts = re.split(r"^### (\d)\. ", PAGE.partition("## Faults")[0], flags=re.MULTILINE)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, PROMISES + 1))
    assert [number for number, text in zip(parts[::2], parts[1::2], strict=True) if len(named(text)) < 3] == []


def test_every_kind_of_fault_has_its_tests() -> None:
    """The table has a row for each fault of `raydist faults`, and no other; each row names a test of the whole command."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert sorted(rows) == sorted(KINDS)
    assert [kind for kind, row in rows.items() if not re.search("tests/(faults|end_to_end)/", row)] == []
    assert [kind for kind, row in rows.items() if not named(row)] == []
