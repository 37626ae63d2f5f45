"""Starts the Python workers of a private Ray by forking a process that has imported Ray, instead of starting Python anew.

Runs in: `serve` in the workers' zygote (raydist/launch/zygote.py), which the driver starts before the raylet. As a script: in the
process that the raylet starts for each worker, in place of Ray's setup_worker.py. Never imports torch.

    raylet --starts--> this script --asks--> zygote --forks--> worker, which registers with the raylet

A worker of Ray imports Ray twice, in setup_worker.py and in default_worker.py, and then what its actor needs: 1.4 to 1.9 s of CPU
time for an actor of a run. A forked one takes 0.2 to 0.5 s. Ray identifies a worker by the id in its arguments, so it need not be
the process that Ray has started. Where the zygote cannot serve (it has exited; the worker has a runtime environment), the script
becomes Ray's own setup_worker.py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    # The folder of this file is on sys.path here: its modules must not be found by their names alone.
    sys.path[0] = str(Path(__file__).parents[2])

from raydist.launch.zygote import Zygote, fork, leave

VARIABLE = "RAYDIST_WORKERS"
"""The environment variable by which the script finds the zygote."""
PRELOAD = ("raydist.cluster.ray_preload",)
DEFAULTS = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator starts a thread, and the zygote is to have none
    # glibc reads it when a program starts: workers inherit it, their ranks do not. With an arena for each of Ray's threads
    # the monitor's memory grows by 0.6 MiB a minute for some eight minutes, until each has its largest size; with one by 0.2.
    "MALLOC_ARENA_MAX": "1",
}
NO_JOB = "ffffffff"
_LANGUAGE, _ENVIRONMENT = "--language=", "--serialized-runtime-env-context"
"""Options of setup_worker.py; it passes all others on."""
_ACCEPTED = b"."


def start_zygote(folder: Path, env: Mapping[str, str]) -> Zygote:
    """For the driver of a private Ray. `env`: the environment of workers, in addition to os.environ. The raylet needs the zygote's
    `variables`."""
    # Ray reads these at its import. Workers get their job with their first task, as those do that Ray starts in advance. A worker
    # exits if the process with that pid does, or if its raylet closes the connection: the raylet's pid is not known yet.
    ray = {"RAY_JOB_ID": NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    return Zygote(str(folder / "zygote-workers"), env, {**DEFAULTS, **ray}, f"{__name__}:serve", PRELOAD, VARIABLE)


def main() -> None:
    """The script. Its arguments are those of setup_worker.py: [flags of Python ...] default_worker.py [options ...]."""
    arguments = sys.argv[1:]
    first = next((number for number, text in enumerate(arguments) if not text.startswith("-")), 0)
    options = [text for text in arguments[first:] if not text.startswith((_LANGUAGE, _ENVIRONMENT))]
    if not (_plain(arguments) and _forked(options)):
        setup = os.path.join(os.path.dirname(arguments[first]), "setup_worker.py")
        # Ray's own scripts find the user's code only before the installed packages.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.getcwd())))
        os.execv(sys.executable, [sys.executable, setup, *arguments])


def _plain(arguments: Sequence[str]) -> bool:
    """Whether the worker is a Python process for which no runtime environment has to be set up."""
    environments = [text.removeprefix(_ENVIRONMENT) for text in arguments if text.startswith(_ENVIRONMENT)]
    return f"{_LANGUAGE}PYTHON" in arguments and all(text == "={}" for text in environments)


def _forked(arguments: Sequence[str]) -> bool:
    """Whether the zygote has forked a worker with these arguments."""
    sys.path[0] = os.path.dirname(arguments[0])  # as for a process that runs that file
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            forked = fork(theirs, os.environ, PRELOAD, VARIABLE)
            if forked is None:
                return False
            forked.close()  # the raylet waits for the worker
        try:
            ours.sendall(json.dumps(list(arguments)).encode())
            ours.shutdown(socket.SHUT_WR)
            return ours.recv(1) == _ACCEPTED
        except OSError:  # the zygote has exited meanwhile
            return False


def serve(fd: int, failure: str) -> None:
    """The worker, in the process that the zygote has forked. `failure`: error of the zygote's imports, or ""."""
    with socket.socket(fileno=fd) as asking:
        if failure:
            return
        received = b"".join(iter(lambda: asking.recv(1 << 16), b""))
        arguments = json.loads(received)
        asking.sendall(_ACCEPTED)
    _become_worker(arguments)


def _become_worker(arguments: list[str]) -> None:
    """Runs Ray's default_worker.py as Python would; never returns."""
    import atexit
    import random
    import runpy
    import signal

    import numpy

    from raydist import registry
    from raydist.cluster import authentication

    registry.own_code_last()
    os.setpgid(0, 0)  # the raylet kills the process group of a worker that has exited: what it has started
    authentication.reread()  # read at Ray's import, as all of its settings
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the zygote ignores it; Ray cancels tasks by it
    random.seed()
    numpy.random.seed()  # users' code may draw from it: each worker has numbers of its own
    sys.argv = arguments
    code: object = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    finally:
        atexit._run_exitfuncs()
    leave(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
