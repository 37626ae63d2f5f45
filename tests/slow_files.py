"""A test file that takes over a minute says why, in a line of its docstring that begins with "Over a minute:".

A file over LIMIT_S without that line is listed. With CI set in the environment it fails the session if it also takes more than
FAIL_SHARE of the time of all tests: a slow or busy machine makes every file slower, and changes that share little.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import needs

LIMIT_S, FAIL_SHARE = 60, 1 / 20
BEGINS = "Over a minute:"
_SHOWN = 40
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Iterator[None]:
    """In CI, the files that take longest, with their share of the time of all tests. The list of slow files, if there is one, comes
    last of all, as a log is often cut to its end."""
    seconds = config.stash[_KEY]
    if needs.in_ci() and (total := sum(seconds.values())):
        terminalreporter.section(f"slowest files, of {total:.0f} s of tests")
        for file, taken in seconds.most_common(_SHOWN):
            terminalreporter.line(f"{taken:6.0f} s  {taken / total:5.1%}  {file}")
    yield
    if found := unexplained(seconds, config.rootpath):
        terminalreporter.section(f"over {LIMIT_S} s, without a line that says why")
        for file in found:
            terminalreporter.line(f"{seconds[file]:6.0f} s  {file}  (docstring: {BEGINS} ...)")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI such a file fails the session."""
    main = not hasattr(session.config, "workerinput")
    if not main or not needs.in_ci() or exitstatus:
        return
    seconds = session.config.stash[_KEY]
    if unexplained(seconds, session.config.rootpath, max(LIMIT_S, FAIL_SHARE * sum(seconds.values()))):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
