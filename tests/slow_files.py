"""A test file that takes over a minute says why, in a line of its docstring that begins with "Over a minute:".

A file over LIMIT_S without that line is listed. With CI set in the environment, a file over FAIL_S fails the session: five times
the limit, because a busy machine makes every file slower.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import needs

LIMIT_S, FAIL_S = 60, 300
BEGINS = "Over a minute:"
_KEY = pytest.StashKey["Counter[str]"]()


def explained(path: Path) -> bool:
    """Whether the file's docstring has the line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return any(line.startswith(BEGINS) for line in text.splitlines())


def unexplained(seconds: Mapping[str, float], root: Path, limit_s: float = LIMIT_S) -> list[str]:
    """Files, by their path below `root`, that take longer than `limit_s` and have no reason."""
    return [file for file, taken in sorted(seconds.items()) if taken > limit_s and not explained(root / file)]


def pytest_configure(config: pytest.Config) -> None:
    """Initially no file has any time."""
    config.stash[_KEY] = Counter()
    config.pluginmanager.register(_Clock(config.stash[_KEY]), "slow_files clock")


class _Clock:
    """Adds up setup, call and teardown of each file's tests, also of those that run in another process."""

    def __init__(self, seconds: Counter[str]) -> None:
        self._seconds: Any = seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the list, if there is one."""
    if found := unexplained(config.stash[_KEY], config.rootpath):
        terminalreporter.section(f"over {LIMIT_S} s, without a line that says why")
        for file in found:
            terminalreporter.line(f"{config.stash[_KEY][file]:6.0f} s  {file}  (docstring: {BEGINS} ...)")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI such a file fails the session."""
    main = not hasattr(session.config, "workerinput")
    if not main or not needs.in_ci() or exitstatus:
        return
    if unexplained(session.config.stash[_KEY], session.config.rootpath, FAIL_S):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
