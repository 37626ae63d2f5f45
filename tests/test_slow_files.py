"""Which files take over a minute without giving a reason."""

from __future__ import annotations

from pathlib import Path

from tests import slow_files


def test_a_slow_file_says_why(tmp_path: Path) -> None:
    """A line of the docstring counts; a comment or a later string does not. A quick file needs none."""
    texts = {
        "why.py": '"""Tests.\n\nOver a minute: three hosts.\n"""\n',
        "comment.py": '# Over a minute: three hosts.\n"""Tests."""\n',
        "later.py": '"""Tests."""\nX = """\nOver a minute: three hosts.\n"""\n',
        "none.py": "import os\n",
        "quick.py": "import os\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    seconds = {name: 59.0 if name == "quick.py" else 61.0 for name in texts}
    assert slow_files.unexplained(seconds, tmp_path) == ["comment.py", "later.py", "none.py"]
