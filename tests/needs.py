"""External tools that some tests need: which are missing, and how to install them.

A test or a fixture calls `require("chromium")`. If the tool is missing the test is skipped. One list at the end shows all of
these skips, with the remedy for each. With CI set in the environment they fail the session.

`python -m tests.needs`, the first step of `make test`, installs the missing tools by apt-get, as root or where sudo asks for no
password.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

MAP_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
"""Options that `unshare` needs to create namespaces."""

_CATEGORY = "skipped for a missing tool"


@dataclass(frozen=True)
class Need:
    """`there()`: whether this machine has it. `remedy`: how a developer installs it. `package`: Debian's, if there is one."""

    there: Callable[[], bool]
    remedy: str
    package: str | None = None


def _commands(package: str, *names: str) -> Need:
    return Need(lambda: all(shutil.which(name) for name in names), f"apt-get install {package}", package)


@functools.cache
def _namespaces() -> bool:
    command = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", *MAP_ROOT, "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@functools.cache
def _mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


NEEDS = {
    "chromium": _commands("chromium", "chromium"),
    "debootstrap": _commands("debootstrap", "debootstrap"),
    "iproute2": _commands("iproute2", "ip", "tc", "bridge"),
    "prometheus": _commands("prometheus", "prometheus"),
    "util-linux": _commands("util-linux", "unshare", "nsenter"),
    "namespaces": Need(_namespaces, "run the tests as root, or let users make namespaces (CONTRIBUTING.md)"),
    "mount": Need(_mount, "run the tests as root"),
    "second user": Need(lambda: os.geteuid() == 0, "run the tests as root"),
}
HOSTS = ("iproute2", "util-linux", "namespaces")
"""The tools for several hosts on one machine (tests/hosts.py)."""


class Missing(Exception):
    """`name` of NEEDS is not on this machine."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"{self.name} is missing: {NEEDS[self.name].remedy}"


def require(*names: str) -> None:
    """Raises Missing for the first of these tools that this machine lacks."""
    for name in names:
        if not NEEDS[name].there():
            raise Missing(name)


def in_ci() -> bool:
    """Whether CI is set in the environment: then no test may be skipped for a missing tool."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turns Missing into a skip whose report has the tool's name, also in xdist's processes."""
    report: Any = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, Missing):
        report.outcome, report.lacking = "skipped", call.excinfo.value.name
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {call.excinfo.value}")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """A category of its own, counted separately and not in the skips that -rs lists."""
    return (_CATEGORY, "s", "SKIPPED") if hasattr(report, "lacking") else None


def _lacking(reporter: Any) -> Counter[str]:
    return Counter(report.lacking for report in reporter.stats.get(_CATEGORY, []))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Prints the list last of all, as a log is often cut to its end."""
    yield
    if found := _lacking(terminalreporter):
        terminalreporter.section("tests skipped: a tool is missing" + (", which CI does not allow" if in_ci() else ""))
        for name, count in sorted(found.items()):
            tests = f"{count} test{'s' * (count > 1)}"
            terminalreporter.line(f"{name:<12}{tests:<12}{NEEDS[name].remedy}")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI such a skip fails the session."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and in_ci() and _lacking(reporter) and exitstatus in (0, 5):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def install() -> int:
    """Installs the missing tools that are packages. Exit code: 1 if one is still missing in CI, else 0."""
    packages = [need.package for need in NEEDS.values() if need.package is not None and not need.there()]
    if packages:
        why = _apt_get(packages)
        still = [name for name, need in NEEDS.items() if need.package in packages and not need.there()]
        if still:
            print(f"not installed: {', '.join(still)} ({why}); tests that need them are skipped", file=sys.stderr)
            return int(in_ci())
    return 0


def _apt_get(packages: list[str]) -> str:
    """Installs them; returns the reason why one is still missing, or ""."""
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n", "env", *(f"{name}={value}" for name, value in quiet.items())]
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if as_root and (shutil.which("sudo") is None or subprocess.run([*as_root, "true"], capture_output=True).returncode):
        return "it takes root, or sudo without a password"
    print(f"installing for the tests: {' '.join(packages)}", file=sys.stderr)
    apt_get = [*as_root, "apt-get", "-qq", "-o", "Acquire::Retries=0"]
    commands = [["update"], *(["install", "-y", "--no-install-recommends", package] for package in packages)]
    said = ""
    for command in commands:
        done = subprocess.run([*apt_get, *command], env=os.environ | quiet, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"apt-get {command[0]} failed"])[-1]
    if "prometheus" in packages and shutil.which("systemctl"):
        # Debian's package starts a service. The tests start their own.
        subprocess.run([*as_root, "systemctl", "disable", "--now", "prometheus"], capture_output=True)
    return said


if __name__ == "__main__":
    sys.exit(install())
