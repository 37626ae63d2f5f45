"""The tutorials: their commands run as written.

On a page of docs/tutorials, `<!-- run -->` stands before a block of commands that is run, and `<!-- file: NAME -->` before the
text of a file. Blocks without a mark need more time; tests/contracts/test_documented_commands.py checks their options. The commands
of a-cluster.md run in test_cluster.py.

Over a minute: four tutorials, in each of which a command starts a Ray of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"
MARKED = re.compile(r"<!-- (run|file: (?P<file>\S+)) -->\n```\w+\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTS = {
    "a-sweep": ["6 cells", "learning_rate"],
    "own-data": ["run topics: finished at step 60"],
    "own-model": ["run conv: finished at step 60", "zero3"],
    "surviving-a-fault": ["run survivor: finished at step 60", "damage_checkpoint", "step-00000030"],
}


def script(page: str) -> str:
    """The page's marked blocks as one shell script, in order."""
    parts = []
    for block in MARKED.finditer(page):
        if block["file"]:
            parts.append(f"cat > {block['file']} <<'END_OF_FILE'\n{block['text']}END_OF_FILE\n")
        else:
            parts.append(block["text"])
    return "\n".join(parts)


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_a_tutorial_runs(tmp_path: Path, name: str) -> None:
    """The page's marked commands exit with 0, in an empty folder, with the files that the page shows."""
    kept = ("LANG", "TMPDIR")
    environment = {k: v for k, v in os.environ.items() if k in kept}
    environment |= {"HOME": str(tmp_path), "COLUMNS": "120"}
    environment |= forked.shell(tmp_path / "bin", f"{sys.prefix}/bin:{os.environ['PATH']}")
    text = script((TUTORIALS / f"{name}.md").read_text(encoding="utf-8"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert [expected for expected in PRINTS[name] if expected not in output] == [], output


def test_every_tutorial_is_here() -> None:
    """Each page has marked commands, and is run; the first day has its own test."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in TUTORIALS.glob("*.md")}
    assert pages.keys() == {*PRINTS, "first-day", "a-cluster"}
    assert [name for name, page in pages.items() if not MARKED.search(page)] == ["first-day"]
