"""Slurm's commands on several hosts of this machine, as far as `raydist deploy slurm` uses them.

The script runs on the first host, as Slurm's batch step does. In it `srun` and `scontrol` are this file: they put a request into a
folder, which the test process carries out on the hosts. Options are as strict as Slurm's: an unknown one is an error. When a
script ends, Slurm kills what it left on its nodes: here the hosts are killed, and start again. `ray start` and Ray's workers are
forked (tests/host_zygotes.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.hosts import LEAN, Host, Hosts, Process, forked_ray, templates

OPTIONS = {
    "job-name": r"\S+", "nodes": r"\d+(-\d+)?", "ntasks-per-node": r"1", "cpus-per-task": r"\d+", "gpus-per-node": r"\d+",
    "mem": r"\d+G", "time": r"[\d:-]+", "partition": r"\S+", "account": r"\S+", "output": r"\S+%j\S*", "exclusive": None,
    "requeue": None, "open-mode": "append", "signal": r"B:USR1@\d+",
}  # fmt: skip
"""Of #SBATCH: what each may be; None: it takes no value."""
JOB_ID = 17


def directives(script: str) -> dict[str, str | None]:
    """The options of the #SBATCH lines before the first command, as sbatch reads them."""
    found: dict[str, str | None] = {}
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in lines[1:]:
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, equals, value = word.removeprefix("--").partition("=")
            expected = OPTIONS[name]
            assert bool(equals) == (expected is not None), line
            assert re.fullmatch(expected or "", value), line
            found[name] = value if equals else None
    return found


class Job:
    """A script that was given to `sbatch`, on all hosts. `runs`: how often it was started; `code`: of its last run, once it ended
    and was not put back into the queue."""

    def __init__(self, hosts: Hosts, folder: Path, script: Path, env: Mapping[str, str]) -> None:
        self._hosts, self._folder, self._script = hosts, folder, script
        self.asked = directives(script.read_text())
        self.log = folder / str(self.asked["output"]).replace("%j", str(JOB_ID))
        self.runs, self.code = 0, None
        self.left: list[str] = []
        """Files of Ray that were still there when a run of the script ended."""
        commands = folder / "bin"
        commands.mkdir()
        for name in ("srun", "scontrol"):
            (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.slurm {folder} {name} "$@"\n')
            (commands / name).chmod(0o755)
        self._templates = templates({**env, **LEAN})
        self._env = {
            **env, **LEAN, "PATH": f"{commands}:{env['PATH']}", "PYTHONPATH": str(Path(__file__).parents[1]),
            "SLURM_JOB_ID": str(JOB_ID), "SLURM_JOB_NUM_NODES": str(len(hosts)), "SLURM_TMPDIR": "/run/tmp",
            "SLURM_JOB_NODELIST": ",".join(host.name for host in hosts),
        }  # fmt: skip
        for each in self._templates:
            self._env |= each.variables
        self._start()

    def signal(self, number: signal.Signals) -> None:
        """To the batch script only, as `--signal=B:` says."""
        self._batch.send_signal(number)

    def until(self, true: Callable[[], bool], timeout: float = 400) -> None:
        """Carries out requests until this is so. Raises TimeoutError with the job's log."""
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(self.log.read_text())
            self._work()
            time.sleep(0.05)  # other processes write the requests

    def _start(self) -> None:
        self.runs += 1
        self._requeued = False
        self._steps: dict[Path, list[Process]] = {}
        for host in self._hosts:
            host.fork_zygotes(self._templates)
        # A step's Ray blocks until it is killed: what it prints goes to the job's log.
        with self.log.open("a") as log:
            self._batch = self._hosts[0].popen(
                ["bash", str(self._script)], env=self._env, cwd=str(self._folder), stdout=log, stderr=log
            )

    def _work(self) -> None:
        for request in sorted(self._folder.glob("*.request")):
            asked = json.loads(request.read_text())
            request.unlink()
            if asked["command"] == "scontrol":
                assert asked["words"] == ["requeue", str(JOB_ID)]
                self._requeued = True
                self._answer(request, 0)
            else:
                self._steps[request] = self._step(request, asked)
        for request, processes in list(self._steps.items()):
            if (term := request.with_suffix(".term")).exists():  # srun passes it on
                term.unlink()
                for process in processes:
                    process.terminate()
            codes = [process.poll() for process in processes]
            if None not in codes:
                self._answer(request, max(code or 0 for code in codes))
                del self._steps[request]
        if self.code is None and (code := self._batch.poll()) is not None:
            self.left += self.folders()
            for host in self._hosts:
                host.kill()
            if self._requeued:
                for host in self._hosts:
                    host.boot()
                self._start()
            else:
                self.code = code

    def folders(self) -> list[str]:
        """Ray's folders on the hosts, each with its mode."""
        listed = f"stat -c '%a %n' {self._env['SLURM_TMPDIR']}/ray-*"
        return [line for host in self._hosts for line in host.run(["sh", "-c", listed]).stdout.splitlines()]

    def _step(self, request: Path, asked: dict[str, Any]) -> list[Process]:
        options, words = {}, list(asked["words"])
        while words[0].startswith("--"):
            name, _, value = words.pop(0).removeprefix("--").partition("=")
            options[name] = value
        assert options.keys() <= {"nodes", "ntasks", "ntasks-per-node", "nodelist", "exclude", "overlap"}, options
        chosen: list[Host] = list(self._hosts)
        if "nodelist" in options:
            chosen = [host for host in chosen if host.name == options["nodelist"]]
        chosen = [host for host in chosen if host.name != options.get("exclude")]
        assert len(chosen) == int(options["nodes"]) == int(options["ntasks"]), options
        if "ray" in words:
            at = words.index("ray")
            assert words[at + 1] == "start", words
            words[at : at + 2] = forked_ray()
        with request.with_suffix(".out").open("w") as out, self.log.open("a") as log:
            return [host.popen(words, env=asked["env"], cwd=asked["cwd"], stdout=out, stderr=log) for host in chosen]

    @staticmethod
    def _answer(request: Path, code: int) -> None:
        part = request.with_suffix(".part")
        part.write_text(str(code))
        part.rename(request.with_suffix(".code"))


def main(folder: Path, command: str, words: list[str]) -> int:
    """The stub of a command, on a host."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
        return 0
    request = folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.request"
    part = request.with_suffix(".new")
    part.write_text(json.dumps({"command": command, "words": words, "env": dict(os.environ), "cwd": os.getcwd()}))
    signal.signal(signal.SIGTERM, lambda *_: request.with_suffix(".term").touch())
    part.rename(request)
    while not (code := request.with_suffix(".code")).exists():
        time.sleep(0.05)  # the test process writes it
    if (out := request.with_suffix(".out")).exists():
        sys.stdout.write(out.read_text())
    return int(code.read_text())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
