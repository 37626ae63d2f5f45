"""raydist as a package: a wheel that is installed, and used from an empty folder without the repository.

Over a minute: a wheel is built, installed and used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = [
    "model.layers=1",
    "model.width=32",
    "train.steps=3",
    "train.global_batch=4",
    "train.micro_batch=2",
    "eval.every=3",
    "eval.batches=1",
]


class Package:
    """The wheel, and a user's folder beside it. Its `site` comes before the repository in the module path."""

    def __init__(self, root: Path) -> None:
        source, self.site, self.home = root / "source", root / "site", root / "home"
        self.home.mkdir()
        # From a copy, because setuptools leaves build/ in the tree.
        ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__", "*.egg-info", "shared")
        shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        made = [*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(root)]
        subprocess.run(made, cwd=source, check=True)
        (self.wheel,) = root.glob("*.whl")
        subprocess.run(
            [*pip, "install", "--no-deps", "--no-index", "--target", str(self.site), str(self.wheel)], check=True
        )

    def run(self, *command: str) -> str:
        """Runs a command, which must exit with 0; returns its stdout."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RAYDIST_"))}
        place = f"{self.site / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**clean, "PATH": place, "PYTHONPATH": str(self.site), "HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=self.home, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """One package for all tests here."""
    return Package(tmp_path_factory.mktemp("package"))


def test_the_wheel_holds_the_package_and_nothing_else(package: Package) -> None:
    """The wheel has every file of raydist/, also those behind links, and no tests, benchmarks or docs."""
    with zipfile.ZipFile(package.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    ours = {path.relative_to(ROOT) for path in (ROOT / "raydist").rglob("*") if path.is_file()}
    for link in (ROOT / "raydist/starter").iterdir():
        ours |= {Path("raydist/starter", link.name, path.name) for path in link.iterdir()}
    assert names == {str(path) for path in ours if "__pycache__" not in path.parts}
    assert "raydist/starter/jobs/quickstart.yaml" in names
    assert "raydist/py.typed" in names


def test_the_installed_command_works_without_the_repository(package: Package) -> None:
    """Commands work from an empty folder: help, the starter files, schema, faults; then a run on Ray and its report. What
    else a user's first commands need is in the wheel, too (the test before); they are those of tests/end_to_end/test_walk.py."""
    told = package.run("python", "-c", "import raydist; print(raydist.__file__)")
    assert Path(told.strip()) == package.site / "raydist/__init__.py"
    assert "train" in package.run("raydist", "--help")
    assert "next: raydist train jobs/quickstart.yaml" in package.run("raydist", "init")
    assert package.run("raydist", "schema") == (package.home / "schemas/spec.schema.json").read_text()
    assert "kill: SIGKILL" in package.run("raydist", "faults")
    assert "learning_rate" in package.run("raydist", "sweep", "tune_sweeps/lr-batch.yaml", "--dry-run")
    changes = [word for field in TINY for word in ("--set", field)]
    told = package.run("raydist", "train", "jobs/quickstart.yaml", "--storage", "runs", *changes)
    assert "run quickstart: finished at step 3" in told
    package.run("raydist", "report", "quickstart", "--storage", "runs", "-o", "report.html")
    page = (package.home / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "quickstart" in page
