"""deploy/docker/Dockerfile: its files are in the build's context, and its commands install a raydist that trains.

The second test runs each RUN line as root in fresh Debian roots, made by debootstrap; it downloads torch, and takes minutes. So it
is not part of `make test`: `make test-image` runs it.

Over a minute: one test installs an operating system and torch, when it is asked for.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
ASKED = "RAYDIST_IMAGE"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's lines: (instruction, rest)."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_context_has_the_files() -> None:
    """What COPY names is in the repository and not ignored; all else is. The image ends as a user, with a health check."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        name for word, rest in instructions() if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    }
    assert "*" in lines
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)
    last = dict(instructions())
    assert last["USER"] == "1000"
    assert "HEALTHCHECK" in last
    assert any(word == "RUN" and "-c constraints.txt" in rest for word, rest in instructions())


@contextmanager
def mounted(root: Path, *folders: str) -> Iterator[None]:
    """These folders of this machine, also in `root`."""
    with ExitStack() as stack:
        for folder in folders:
            (root / folder[1:]).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", folder, root / folder[1:]], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", root / folder[1:]], check=True)
        yield


def settings() -> list[str]:
    """The files and folders of this machine by which apt and pip find their packages."""
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True).stdout + " ".join(
        os.environ.values()
    )
    local = {path for path in re.findall(r"(?:file://)?(/[\w./-]+)", listed) if Path(path).exists()}
    fixed = [
        "/etc/resolv.conf",
        "/etc/apt",
        "/etc/pip.conf",
        "/etc/xdg/pip",
        "/root/.config/pip",
        "/etc/ssl/certs",
        "/usr/share/keyrings",
    ]
    return [
        path for path in (*fixed, *sorted(p for p in local if p.startswith(("/opt/", "/etc/")))) if Path(path).exists()
    ]


def provide(root: Path) -> None:
    """Copies them into `root`; again before each command, since a package may replace one, such as the list of certificates.

    A link there may lead to a file of this machine, so it is removed, not followed.
    """
    for path in settings():
        there = root / path[1:]
        there.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-aLT", "--remove-destination", path, there], check=True)


def run(
    root: Path, command: list[str], user: str, folder: str, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command in `root`, as docker does."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    chroot = shutil.which("chroot")  # `env` has the container's PATH
    assert chroot is not None
    line = [chroot, "--userspec", user, root, "/usr/bin/env", "-C", folder, *command]
    return subprocess.run(line, env={"HOME": "/tmp", **pip, **env}, capture_output=True, text=True, timeout=3000)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(ASKED not in os.environ, reason="it installs torch into a fresh Debian: make test-image runs it")
def test_the_image_trains(tmp_path: Path) -> None:
    """The stages are built in two fresh roots. In the last one its user runs a job to its end, and can write no file of raydist."""
    needs.require("mount", "debootstrap")
    sources = next(Path("/etc/apt/sources.list.d").glob("*.sources")).read_text()
    (mirror, *_) = re.findall(r"^URIs: (\S+)", sources, re.MULTILINE)
    base = tmp_path / "base"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", base, mirror], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    stages: list[Path] = []
    names: dict[str, Path] = {}
    env: dict[str, str] = {}
    user, folder = "root", "/"
    with ExitStack() as stack:
        for word, rest in instructions():
            match word:
                case "FROM":
                    stages.append(tmp_path / f"stage{len(stages)}")
                    subprocess.run(["cp", "-a", base, stages[-1]], check=True)
                    stack.enter_context(mounted(stages[-1], "/proc", "/dev", "/dev/shm"))
                    names[rest.rpartition(" AS ")[2]] = stages[-1]
                    env, user, folder = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "root", "/"
                case "RUN":
                    provide(stages[-1])
                    done = run(stages[-1], ["sh", "-c", rest], user, folder, env | {"PIP_OPTIONS": ""})
                    assert done.returncode == 0, f"{rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
                case "WORKDIR":
                    folder = rest
                    (stages[-1] / rest[1:]).mkdir(exist_ok=True)
                case "COPY":
                    *files, to = [each for each in rest.split() if not each.startswith("--")]
                    source = names["build"] if "--from=build" in rest else ROOT
                    for file in files:
                        target = stages[-1] / (to[1:] if to.startswith("/") else f"{folder[1:]}/{to}")
                        subprocess.run(["cp", "-a", source / file.lstrip("/"), target], check=True)
                case "ENV":
                    env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
                case "USER":
                    user = f"{rest}:{rest}"
        shm = stages[-1] / "dev/shm"
        assert shm.is_dir()
        login = env | {"PATH": "/usr/bin:/bin"}
        version = run(stages[-1], ["bash", "-lc", "raydist --version && ray --version"], user, folder, login)
        assert version.returncode == 0, version.stderr
        model = "model: {layers: 1, width: 16, heads: 2, context: 16}"
        job = f"data: {{source: python-stdlib}}\n{model}\ntrain: {{steps: 2, global_batch: 4, micro_batch: 4}}\n"
        (stages[-1] / "work/job.yaml").write_text(job)
        trained = run(
            stages[-1],
            ["raydist", "train", "job.yaml", "--storage", "/runs"],
            user,
            folder,
            env | {"HOME": "/home/ray"},
        )
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert "finished at step 2" in trained.stdout
        assert run(stages[-1], ["touch", "/opt/raydist/bin/raydist"], user, folder, env).returncode != 0
        assert [word for word, _ in instructions() if word not in HANDLED] == []


HANDLED = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "HEALTHCHECK", "CMD"}
