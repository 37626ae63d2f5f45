"""Tests whose tools are missing are skipped and listed in one place; in CI they fail the session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parents[1]
SELECTED = [
    "tests/cluster/test_hosts.py::test_nothing_is_left",
    "tests/report/html/test_page.py::test_the_page_is_whole_and_asks_for_nothing",
    "tests/cluster/test_prometheus.py::test_the_dashboard_shows_a_running_job",
    "tests/run/test_requests.py",
]


def without_tools(tmp_path: Path, ci: str, *options: str) -> tuple[int, str]:
    """Runs a few tests with an empty PATH: exit code and output."""
    env = {**os.environ, "PATH": str(tmp_path), "CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *SELECTED]
    done = subprocess.run(tests, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(("ci", "options", "code"), [("", ["-n", "2"], 0), ("true", [], 1)])
def test_skips_for_missing_tools_are_listed(tmp_path: Path, ci: str, options: list[str], code: int) -> None:
    """Each tool is listed once, with the number of tests and the remedy, with one process or two; the other tests run. CI fails."""
    ended, out = without_tools(tmp_path, ci, *options)
    assert ended == code, out
    told = out[out.index(" tests skipped: a tool is missing") :].splitlines()
    assert (", which CI does not allow" in told[0]) == bool(ci)
    assert [line.split() for line in told[1:4]] == [
        ["chromium", "1", "test", "apt-get", "install", "chromium"],
        ["iproute2", "5", "tests", "apt-get", "install", "iproute2"],
        ["prometheus", "1", "test", "apt-get", "install", "prometheus"],
    ]
    assert "passed" in told[-1]
    assert "7 skipped for a missing tool" in told[-1]
    assert "SKIPPED" not in out  # not a second time, among the skips for other reasons


FAKE = """#!{python}
import os, sys
here, packages = {here!r}, {packages!r}
open(f"{{here}}/calls", "a").write(" ".join(sys.argv[1:]) + "\\n")
if packages is None:
    sys.exit("E: no network")
for name in packages.get(sys.argv[-1], ()):
    os.close(os.open(f"{{here}}/{{name}}", os.O_CREAT, 0o755))
"""
INSTALLED = {
    "chromium": ["chromium"],
    "debootstrap": ["debootstrap"],
    "iproute2": ["ip", "tc", "bridge"],
    "prometheus": ["prometheus"],
    "util-linux": ["unshare", "nsenter"],
}


def command(folder: Path, name: str, packages: dict[str, list[str]] | None) -> None:
    """An executable `name` that records its calls in `folder`/calls and creates the commands of a package; None: it fails."""
    (folder / name).write_text(FAKE.format(python=sys.executable, here=str(folder), packages=packages))
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH, as root and outside CI, for any user who runs the tests."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


def test_missing_tools_are_installed(path: Path) -> None:
    """Each package is installed separately, after one update; apt-get does not run once all tools are there."""
    command(path, "apt-get", INSTALLED)
    assert needs.install() == 0
    calls = (path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["update", *INSTALLED]
    assert needs.install() == 0
    assert (path / "calls").read_text().splitlines() == calls


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_failed_installation_is_reported(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ci: str
) -> None:
    """One line shows apt-get's message, and the tests continue; CI stops at once."""
    monkeypatch.setenv("CI", ci)
    command(path, "apt-get", None)
    assert needs.install() == bool(ci)
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == (f"not installed: {', '.join(INSTALLED)} (E: no network); tests that need them are skipped")


def test_without_the_right_to_install(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sudo asks for a password no installation is attempted."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command(path, "apt-get", INSTALLED)
    command(path, "sudo", None)
    assert needs.install() == 0
    assert "(it takes root, or sudo without a password)" in capsys.readouterr().err
    assert (path / "calls").read_text() == "-n env DEBIAN_FRONTEND=noninteractive true\n"
