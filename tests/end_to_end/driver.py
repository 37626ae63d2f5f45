"""One driver process with one private Ray, which runs many `raydist` commands one after another.

A command that starts its own Ray takes about 12 s of CPU time, most of it for imports and Ray's processes. Tests that do not
check the start or the end of Ray run theirs here. Different from a user's command: `open_session` returns the open session, and
the workers of one `raydist train` or `run` are kept for the next, as with a sweep's cells. The same: the command line, the driver's
code, its signals, Ray's workers and the ranks.

`Warm` is the test's side. `python -m tests.end_to_end.driver` is the driver, which is forked (tests/forked.py): it executes one
JSON line from stdin after another.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tests import forked

REPOSITORY = Path(__file__).parents[2]
END_S = 240


class Warm:
    """The test's handle of the driver process. `folder`: where commands run, and where their output is kept."""

    living: list[Warm] = []  # noqa: RUF012 - all of this process

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        # One folder for each driver of this project: a file of tests may end its driver, and the next one starts another.
        self._logs = Path(tempfile.mkdtemp(prefix="warm-", dir=folder))
        self._number = 0
        program = ["tests.end_to_end.driver", str(folder), str(self._logs / "ray")]
        # The driver's own output, and Ray's files.
        with (self._logs / "driver").open("w") as log:
            self.process = forked.Program(
                program, env, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self.living.append(self)
        assert self._answer() == "ready", (self._logs / "driver").read_text()
        self.own = {self.process.pid, *(p.pid for p in self.process.processes())}
        """Its processes while no command runs, without Ray's idle workers, whose number changes."""

    def start(self, arguments: Sequence[str]) -> WarmCommand:
        """Starts a command; only one at a time."""
        self._number += 1
        return WarmCommand(self, arguments, self._logs / f"{self._number}.out", self._logs / f"{self._number}.err")

    def settle(self) -> None:
        """Ends the workers that are kept for the next run."""
        self.order(arguments=[])
        assert self._answer() == 0

    def order(self, **what: Any) -> None:
        """Sends a line to the driver."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Ends Ray and the driver."""
        self.living.remove(self)
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


class WarmCommand:
    """A command of the warm driver, with the part of `forked.Program` that the tests use. `inner`, `processes`
    and signals are the driver's."""

    def __init__(self, warm: Warm, arguments: Sequence[str], out: Path, err: Path) -> None:
        self.args, self._warm, self._out, self._err = list(arguments), warm, out, err
        self.inner, self.processes = warm.process.inner, warm.process.processes
        self.returncode: int | None = None
        for path in (out, err):
            path.touch()
        self.stderr = _Tail(err, self)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        warm.order(arguments=self.args, out=str(out), err=str(err))
        self._thread.start()

    def _wait(self) -> None:
        code = self._warm._answer()
        self.returncode = code if code is not None else self._warm.process.wait()

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends the signal to the driver, which passes it to the command."""
        self._warm.process.send_signal(number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; returns stdout, and the rest of stderr. Raises subprocess.TimeoutExpired."""
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0, self._out.read_text(), self._err.read_text())
        return self._out.read_text(), self.stderr.read()


class _Tail:
    """The lines of a file that the command is still writing."""

    def __init__(self, path: Path, command: WarmCommand) -> None:
        self._file, self._command = path.open(), command

    def __iter__(self) -> Iterator[str]:
        while line := self.readline():
            yield line

    def readline(self) -> str:
        """The next line; "" at the end, once the command has ended."""
        begun = ""
        while True:
            ended = self._command.poll() is not None
            begun += self._file.readline()
            if begun.endswith("\n") or ended:
                return begun
            time.sleep(0.02)  # the command is writing it

    def read(self) -> str:
        """The rest of the file, once the command has ended."""
        with self._file:
            return self._file.read()


# --- in the driver


def _obey(arguments: list[str], out: TextIO, err: TextIO) -> int:
    """Runs one command as the shell would; returns its exit code."""
    from raydist.cli.main import main
    from raydist.cluster.ray_output import WithoutRay

    quiet: Any = WithoutRay(out, sys.stderr)  # as open_session has it
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
    return 0


def _serve(folder: str, logs: str) -> None:
    import ray

    from raydist.cluster import session as module
    from raydist.cluster.run import supervisor
    from raydist.cluster.run.supervisor import Supervisor
    from raydist.cluster.run.worker_group_slot import WorkerGroupSlot

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output from outside a command goes to stderr
    os.chdir(folder)
    env = module.worker_environment()
    with module.open_session("local", env=env, log_dir=Path(logs), python_path=[folder], ranks=True) as opened:

        @contextlib.contextmanager
        def already(
            address: str, *, env: Mapping[str, str], metrics_port: int | None = None, **_: Any
        ) -> Iterator[Any]:
            # Workers have the environment of this Ray's start.
            assert (address, metrics_port) == ("local", None)
            assert all(os.environ.get(name) == value for name, value in env.items()), env
            os.environ["RAY_ADDRESS"] = (
                opened.address
            )  # as in open_session; before, `--address` defaults to this machine alone
            try:
                yield opened
            finally:
                del os.environ["RAY_ADDRESS"]
                for name in ray.util.list_named_actors():  # such as a sweep's, which normally end with their driver
                    ray.kill(ray.get_actor(name))
                for tune in opened.temp_dir.glob("tune-*"):  # of this Ray job, which all commands here share
                    shutil.rmtree(tune, ignore_errors=True)

        del os.environ["RAY_ADDRESS"]
        kept = WorkerGroupSlot(opened)

        class Keeping(Supervisor):
            """Keeps the workers of its run for the next one."""

            @classmethod
            def build(cls, *arguments: Any, slot: WorkerGroupSlot | None = None, **options: Any) -> Supervisor:
                return super().build(*arguments, slot=slot or kept, **options)

        module.open_session = already  # type: ignore[assignment]
        supervisor.Supervisor = Keeping  # type: ignore[misc]
        answers.write('"ready"\n')
        for line in sys.stdin:
            order = json.loads(line)
            if order["arguments"][:1] not in (["train"], ["run"]):
                kept.end()
                kept._coordinator = None
            if not order["arguments"]:
                gc.collect()
                answers.write("0\n")
                continue
            with open(order["out"], "w", buffering=1) as out, open(order["err"], "w", buffering=1) as err:
                code = _obey(order["arguments"], out, err)
            gc.collect()  # an actor ends when its last handle is deleted
            answers.write(json.dumps(code) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve(*sys.argv[1:])
