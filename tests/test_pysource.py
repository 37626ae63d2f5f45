"""A name that a module certainly lacks is found without running it; where only an import can tell, nothing is reported."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raydist import pysource
from raydist.pysource import lacks

THERE = {
    "a function": "def build(): ...",
    "an async one": "async def build(): ...",
    "a class": "class build: ...",
    "assigned": "build = 1",
    "unpacked": "(a, [build, *c]) = f()",
    "annotated": "build: int = 1",
    "imported": "from models import build",
    "imported by another name": "import models as build",
    "a package": "import build.parts",
    "under a condition": "if cuda:\n    from fast import build\nelse:\n    build = None",
    "where an import failed": "try:\n    from fast import build\nexcept ImportError:\n    def build(): ...",
    "in a with": "with f() as build: ...",
    "in a loop": "for build in (): ...",
    "a walrus": "if (build := f()): ...",
    "global in a function": "def f():\n    global build\n    build = 1\nf()",
    "matched": "match f():\n    case {'a': 1, **build}: ...",
}
UNSURE = {
    "all of another": "from models import *",
    "asked for": "def __getattr__(name): ...",
    "by globals": "globals()['build'] = 1",
    "by globals in a function": "def f():\n    globals()['build'] = 1\nf()",
    "executed": "exec('build = 1')",
    "by sys": "import sys\nsys.modules[__name__] = object()",
    "by a registry in a function": "import sys\ndef f():\n    setattr(sys.modules[__name__], 'build', 1)\nf()",
}
MISSING = {
    "another name": "def bild(): ...",
    "inside a function": "def f():\n    build = 1",
    "inside a class": "class A:\n    def build(self): ...",
    "only read": "f = build",
    "an attribute": "model.build = 1",
    "nothing": "",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `early_look`, which raises if it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "early_look.py"


@pytest.mark.parametrize("text", [*THERE.values(), *UNSURE.values()], ids=[*THERE, *UNSURE])
def test_nothing_is_said_where_it_may_be_there(module: Path, text: str) -> None:
    """No error if a statement of the module binds the name, or if it may be bound in a way that the text does not show."""
    module.write_text(f"{text}\nraise SystemExit\n")
    assert lacks("early_look", "build") is None


@pytest.mark.parametrize("text", MISSING.values(), ids=list(MISSING))
def test_what_is_surely_missing_is_named(module: Path, text: str) -> None:
    """No statement of the module binds the name."""
    module.write_text(f"{text}\nraise SystemExit\n")
    assert lacks("early_look", "build") == 'early_look has no "build"'


def test_a_file_that_is_no_python_says_where(module: Path) -> None:
    """The error has the line of the syntax error."""
    module.write_text("a = 1\ndef build(:\n")
    assert lacks("early_look", "build") == "early_look.py, line 2: invalid syntax"


def test_packages_and_what_is_no_source(module: Path) -> None:
    """A package has its submodules; for a module without a source file only the import can tell."""
    package = module.parent / "early_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("")
    assert lacks("early_package", "parts") is None
    assert lacks("early_package", "build") == 'early_package has no "build"'
    assert lacks("math", "build") is None


class Garbage:
    """Only the garbage collector frees it; its finalizer lets another thread run."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        threading.Event().wait(0)


def test_threads_parse_at_once() -> None:
    """A garbage collection within one thread's parse does not fail another's, as it does with `ast.parse` of Python 3.11."""
    text = Path(pysource.__file__).read_bytes()

    def parse() -> None:
        for _ in range(50):
            _ = [Garbage() for _ in range(20)]
            pysource.parse(text, pysource.__file__)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(parse) for _ in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
