"""Jobs on a real cluster, started by `ray start --head`: by `raydist submit`, by `ray job submit`, and by address.

Over a minute: nine jobs, each with a driver that Ray's jobs API starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import raydist
from raydist.cluster import ray_worker
from raydist.launch import fork_server
from raydist.run.sweep_directory import SweepDir
from raydist.run.sweep_state import fold
from tests import forked
from tests.end_to_end.test_tutorials import TUTORIALS, script
from tests.exact import exact
from tests.hosts import LEAN
from tests.ports import free_ports
from tests.stderr import without_stages

SHORT = "--workers 2 --op all_reduce --max-bytes 1KiB --iters 2"
"""Options with which `raydist bench comm` takes a moment."""
RAY = str(Path(sys.executable).with_name("ray"))
REPOSITORY = Path(__file__).parents[2]


TOKEN = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
"""The cluster requires this token, as Ray does if a token file exists; raydist detects that it has to send it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The head of a cluster: {"gcs": HOST:PORT, "jobs": http://HOST:PORT}; all its processes are ended with the module. Workers
    and the jobs' drivers are forked (tests/forked.py), except those of a job that ships a raydist of its own."""
    gcs, dashboard, agent, grpc, export, runtime = free_ports(6)
    with tempfile.TemporaryDirectory(prefix="rd-head-", dir="/tmp") as temp:
        command = [
            sys.executable, "-m", "tests.hosts", "start-whole", "--head", "--block", f"--port={gcs}",
            "--node-ip-address=127.0.0.1", "--num-cpus=2",
            "--include-dashboard=true", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
            f"--dashboard-agent-grpc-port={grpc}", f"--metrics-export-port={export}",
            f"--runtime-env-agent-port={runtime}", f"--temp-dir={temp}", "--object-store-memory=100000000",
            "--disable-usage-stats", "--include-log-monitor=false", "--no-monitor", '--resources={"accelerator_type:A100": 1}',
        ]  # fmt: skip
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | TOKEN | {"RAY_AUTH_MODE": "token"}
        env |= LEAN
        # The `python` of a job's entrypoint is the first on the head's PATH, as in an activated environment.
        env |= forked.shell(Path(temp, "bin"), f"{Path(sys.executable).parent}:{env['PATH']}")
        zygotes = [
            ray_worker.start_zygote(Path(temp), {**TOKEN, **LEAN, "RAY_AUTH_MODE": "token"}),
            fork_server.start_zygote(Path(temp), {}),
        ]
        for zygote in zygotes:
            env |= zygote.variables
        with open(f"{temp}/head.log", "wb") as log:
            head = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            _answers(f"http://127.0.0.1:{dashboard}/api/version", head, f"{temp}/head.log")
            # Jobs need the node's agents, for which its raylet waits. On a busy machine the dashboard answers long before.
            deadline = time.monotonic() + 240
            while "Ray runtime started" not in (told := Path(temp, "head.log").read_text()):
                assert head.poll() is None, told
                assert time.monotonic() < deadline, told
                time.sleep(0.1)  # the head writes it
            yield {"gcs": f"127.0.0.1:{gcs}", "jobs": f"http://127.0.0.1:{dashboard}"}
            assert head.poll() is None, f"the head has ended meanwhile:\n{Path(temp, 'head.log').read_text()}"
        finally:
            roots = [psutil.Process(each.pid) for each in zygotes]
            roots += [] if head.poll() is not None else [psutil.Process(head.pid)]
            mine = [process for root in roots for process in (root, *root.children(recursive=True))]
            for process in mine:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait(240)
            for zygote in zygotes:
                zygote.close()
            _, alive = psutil.wait_procs(mine, timeout=120)
            assert not alive, alive


def _answers(url: str, head: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert head.poll() is None, Path(log).read_text()
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, and requires the token
        except (urllib.error.URLError, OSError):
            try:
                head.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(f"no answer from {url}\n{Path(log).read_text()}")


def working_dir(project: Any, name: str, package: bool = False) -> tuple[Path, list[str]]:
    """A folder to upload, with the job, and the package or not: each process that imports it creates a file. Data and runs are on
    storage that the nodes share."""
    folder = project.root / f"ship-{name}"
    folder.mkdir()
    for file in ("job.yaml", "faulty.py"):
        shutil.copy(project.root / file, folder)
    if package:
        shutil.copytree(REPOSITORY / "raydist", folder / "raydist", ignore=shutil.ignore_patterns("__pycache__"))
        shipped = str(project.root / f"shipped-{name}")
        os.mkdir(shipped)
        with (folder / "raydist/__init__.py").open("a") as file:
            file.write(f"import os\nopen({shipped!r} + f'/{{os.getpid()}}', 'w').close()\n")
    data = ["--set", f"data.path={project.root / 'data'}", "--storage", str(project.runs)]
    return folder, [*project.options(name), "--name", name, *data]


def test_raydist_submit(project: Any, cluster: dict[str, str], undisturbed: dict[str, Any]) -> None:
    """`raydist submit` uploads the folder, follows the log to the end, and exits with 0. The job's driver is killed once; `submit`
    submits the job again, and the run equals the one on a private Ray, bit for bit."""
    folder, arguments = working_dir(project, "submitted")
    (folder / "faults.yaml").write_text("- {fault: kill_driver, step: 5}\n")
    (folder / ".gitignore").write_text("*.yaml\n")  # files that the job names are uploaded nevertheless
    (folder / "old/attempts").mkdir(parents=True)
    (folder / "old/spec.yaml").touch()
    job = ["raydist", "submit", "job.yaml", "--address", cluster["jobs"], *arguments]
    job += ["--retries", "1", "--faults", "faults.yaml"]
    done = forked.run(job, project.environment() | TOKEN, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "step 12/12" in done.stderr or "step 12" in done.stderr
    assert "submitting it again" in done.stderr
    assert "sdk.py" not in done.stderr
    assert re.search(rf"ships \d+ files of {folder}: .* packed; left out: old \(a run\)$", done.stderr, re.MULTILINE)
    assert project.show("submitted")["status"] == "finished"
    assert len(project.show("submitted")["attempts"]) == 2
    assert exact(project.steps("submitted")) == exact(undisturbed["rows"])
    assert project.show("submitted")["loss"] == undisturbed["shown"]["loss"]


def test_ray_job_submit(project: Any, cluster: dict[str, str]) -> None:
    """`ray job submit` trains the same job, with the raydist in its folder; the last line of its log is the run as JSON."""
    folder, arguments = working_dir(project, "by-ray", package=True)
    command = ["python", "-m", "raydist", "train", "job.yaml", "--json", *arguments]
    job = [RAY, "job", "submit", "--address", cluster["jobs"], "--working-dir", str(folder), "--", *command]
    env = project.environment() | TOKEN | {"RAY_AUTH_MODE": "token"}  # Ray's own tools also need the mode
    done = subprocess.run(job, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(s for s in done.stdout.splitlines() if s.startswith('{"run"'))
    assert json.loads(line)["status"] == "finished"
    assert len(os.listdir(project.root / "shipped-by-ray")) >= 3, "the driver, and at least the two workers"


def test_a_users_loop_by_address_and_submitted(
    project: Any, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`raydist run` ships the working directory, with the script, and trains there; a rank is killed by --faults. `raydist.submit`
    of the script, as a Ray job, gives the bits of that run."""
    (project.root / "kill.yaml").write_text("- {fault: kill, rank: 1, step: 3}\n")
    options = ["--faults", "kill.yaml", "--workers", "2", "--name", "own-cluster", "--address", cluster["gcs"]]
    done = project.raydist("run", "loop.py", *options, "--", "5", "sound", env=TOKEN)
    assert done.returncode == 0, done.stderr
    assert (project.show("own-cluster")["status"], len(project.steps("own-cluster"))) == ("finished", 5)
    assert [(e["rank"], e["fault"]) for e in project.events("own-cluster", "failure")] == [(1, "worker_died")]
    monkeypatch.chdir(project.root)
    for name, value in (TOKEN | {"RAYDIST_STORAGE": str(project.runs)}).items():
        monkeypatch.setenv(name, value)
    given: dict[str, Any] = {"workers": 2, "name": "own-submitted", "storage": str(project.runs)}
    assert raydist.submit("loop.py", cluster["jobs"], [5, "sound"], **given).startswith("raysubmit_")
    assert exact(project.steps("own-submitted")) == exact(project.steps("own-cluster"))


def test_what_a_cluster_refuses(project: Any, cluster: dict[str, str]) -> None:
    """Too many workers, or a wrong token, exit with code 2. Training by address: tests/end_to_end/test_hosts.py."""
    more = ["--set", "cluster.workers=8", "--set", "cluster.cpus_per_worker=1"]
    done = project.raydist(
        "train", "job.yaml", "--name", "big", "--address", cluster["gcs"], *project.options("big"), *more, env=TOKEN
    )
    assert done.returncode == 2
    assert "8 workers of 1 CPU, the cluster has 1 node with 2 CPUs in all: 2 would fit" in done.stderr
    other = {"RAY_AUTH_TOKEN": "f" * 64}
    for command in (
        ["submit", "job.yaml", "--address", cluster["jobs"], *project.options("big")],
        ["train", "job.yaml", "--name", "big", "--address", cluster["gcs"], *project.options("big")],
    ):
        done = project.raydist(*command, env=other)
        assert (done.returncode, len(without_stages(done.stderr).splitlines())) == (2, 2), done.stderr
        assert (
            f"{cluster['jobs' if command[0] == 'submit' else 'gcs']} rejects the token of RAY_AUTH_TOKEN" in done.stderr
        )


def test_a_dry_run_by_address(project: Any, cluster: dict[str, str]) -> None:
    """The dry run of a sweep estimates its hours for the GPU that the cluster's nodes report."""
    sweep_of(project.root, 12)
    command = ["sweep", "sweep.yaml", "--dry-run", "--json", "--address", cluster["gcs"]]
    done = project.raydist(*command, "--set", "cluster.gpus_per_worker=1", "--set", "model.name=gpt", env=TOKEN)
    assert done.returncode == 0, done.stderr
    assert [cell["by"] for cell in json.loads(done.stdout)["cells"]] == ["reckoned for A100 at 40% of its peak"] * 2


def sweep_of(folder: Path, steps: int) -> None:
    """Writes sweep.yaml: two cells of the job, one after the other."""
    array = {"type": "list", "parameters": [{"learning_rate": 1e-3}, {"learning_rate": 1e-2}], "concurrent": 1}
    job = {"extends": "job.yaml", "train": {"steps": steps}}
    (folder / "base.yaml").write_text(json.dumps(job))
    (folder / "sweep.yaml").write_text(json.dumps({"base": "base.yaml", "array": array}))


def submitted(project: Any, cluster: dict[str, str], folder: Path, arguments: list[str]) -> forked.Program:
    """Starts `raydist submit sweep.yaml`."""
    command = ["raydist", "submit", "sweep.yaml", "--address", cluster["jobs"], *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forked.Program(command, project.environment() | TOKEN, cwd=folder, **pipes)


def test_raydist_submit_of_a_sweep(project: Any, cluster: dict[str, str]) -> None:
    """The sweep runs as a Ray job, its cells on the cluster; `submit` prints the log to its end, and the results are on
    storage."""
    folder, arguments = working_dir(project, "swept")
    sweep_of(folder, 12)
    process = submitted(project, cluster, folder, arguments)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "all results on one page: " in err
    done = project.raydist("sweep", "results", "swept", "--json")
    told = json.loads(done.stdout)
    assert told["counts"] == {"finished": 2}, done.stderr
    assert [row["tokens"] for row in told["points"]] == [12 * 8 * 16] * 2


def test_the_tutorial(project: Any, cluster: dict[str, str], tmp_path: Path) -> None:
    """docs/tutorials/a-cluster.md, with a job of seconds on two workers, a folder as storage, and a short measurement of one
    collective: all commands exit with 0."""
    job = yaml.safe_load((project.root / "job.yaml").read_text())
    job |= {"name": "quickstart", "model": job["model"] | {"name": "gpt"}, "data": {"path": str(project.root / "data")}}
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/quickstart.yaml").write_text(json.dumps(job))
    text = script((TUTORIALS / "a-cluster.md").read_text(encoding="utf-8"))
    assert text.count("raydist ") == 7
    for there, here in (
        ("http://HEAD:8265", cluster["jobs"]),
        ("bench comm --address HEAD:6379", f"bench comm --address {cluster['gcs']} {SHORT}"),
        ("HEAD:6379", cluster["gcs"]),
        ("s3://bucket/runs", str(project.runs)),
        ("cluster.workers=4", "cluster.workers=2"),
    ):
        assert there in text
        text = text.replace(there, here)
    env = project.environment() | TOKEN | forked.shell(tmp_path / "bin", f"{sys.prefix}/bin:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.show("quickstart")["status"], len(project.steps("quickstart"))) == ("finished", 12)


def test_a_sweep_that_is_left_and_then_stopped(project: Any, cluster: dict[str, str]) -> None:
    """Ctrl-C ends `raydist submit`, not the job, and prints how to stop the job; on `ray job stop` the cell in training makes a
    checkpoint."""
    folder, arguments = working_dir(project, "stopped")
    sweep_of(folder, 100_000)
    process = submitted(project, cluster, folder, arguments)
    sweep = SweepDir(project.runs / "stopped")
    deadline = time.monotonic() + 180
    while not (sweep.exists() and sweep.run(sweep.cells()[0].id).committed()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    (job,) = re.findall(r"^job (\S+) continues; .* ray job stop \1 --address", err, re.MULTILINE)
    first, second = (cell.id for cell in sweep.cells())
    assert fold(sweep.events())[first].status == "running"
    env = project.environment() | TOKEN | {"RAY_AUTH_MODE": "token"}
    stop = [RAY, "job", "stop", job, "--address", cluster["jobs"]]
    done = subprocess.run(stop, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    states = fold(sweep.events())
    assert states[first].status == "paused"
    assert states[first].figures["steps"] == sweep.run(first).committed()[-1]
    assert second not in states


def test_a_job_that_fails_ends_submit_with_its_code(project: Any, cluster: dict[str, str]) -> None:
    """A mistake that is only found on the cluster, a missing dataset, is reported by `submit` with exit code 2; here by the
    raydist that it has uploaded."""
    folder, arguments = working_dir(project, "no-data", package=True)
    job = ["raydist", "submit", "job.yaml", "--address", cluster["jobs"], *arguments]
    job += ["--set", "data.path=/no/such/place"]
    done = forked.run(job, project.environment() | TOKEN, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "/no/such/place" in done.stderr
    assert os.listdir(project.root / "shipped-no-data")


def test_a_cluster_that_is_not_there(project: Any) -> None:
    """For train and for submit, an address where nothing listens gives one clear error."""
    (port,) = free_ports(1)
    for command in (
        ["train", "job.yaml", "--name", "nowhere", "--address", f"127.0.0.1:{port}", *project.options("nowhere")],
        ["submit", "job.yaml", "--address", f"http://127.0.0.1:{port}"],
    ):
        done = project.raydist(*command)
        assert done.returncode == 2, done.stderr
        assert f"127.0.0.1:{port}" in done.stderr
        assert "Traceback" not in done.stderr
