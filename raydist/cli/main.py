"""The `raydist` command: its sub-commands and its exit codes.

Runs in: the user's shell. Must stay light: `raydist --help` answers in half a second.

0: success. 2: invalid request; nothing was started. 3: the training stopped. 70: an error of raydist itself (crash.py).
130, 143: interrupted by SIGINT or SIGTERM.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

import raydist
from raydist import __version__, registry
from raydist.api.parent import Parent
from raydist.cli import (
    bench,
    check,
    checkpoint,
    convert,
    crash,
    dashboard,
    data,
    deploy,
    doctor,
    evaluate,
    faults,
    init,
    logs,
    plan,
    profile,
    report,
    rm,
    run,
    runs,
    sample,
    schema,
    stop,
    submit,
    sweep,
    trace,
    train,
    watch,
)
from raydist.cli.options import bounded
from raydist.cluster.head_monitor import leave
from raydist.errors import RaydistError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a write to stdout if that is a file: disk full, quota exceeded, I/O error."""

app = typer.Typer(
    name="raydist",
    help="Trains PyTorch models on a Ray cluster, and recovers from failures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    init.init,
    train.train,
    run.run,
    submit.submit,
    runs.runs,
    runs.show,
    stop.stop,
    logs.logs,
    rm.rm,
    watch.watch,
    profile.profile,
    doctor.doctor,
    trace.trace,
    report.report,
    dashboard.dashboard,
    sample.sample,
    evaluate.evaluate,
    schema.schema,
    plan.plan,
    check.check,
    faults.faults,
):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(convert.app, name="convert")
app.add_typer(bench.app, name="bench")
app.add_typer(deploy.app, name="deploy")
app.add_typer(sweep.app, name="sweep")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"raydist {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Trains PyTorch models on a Ray cluster, and recovers from failures."""


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits with its code. A RaydistError is printed as one message on stderr."""
    parent = Parent.take()
    try:
        _set_imports(sys.argv[1:] if arguments is None else arguments)
    except FileNotFoundError:
        print("raydist: the working directory no longer exists\n  change to an existing one: cd", file=sys.stderr)
        sys.exit(2)
    try:
        _run(arguments)
    except RaydistError as error:
        print(f"raydist: {error}", file=sys.stderr)
        parent.tell(error)
        leave(2 if isinstance(error, StorageError) and not _started(arguments) else error.exit_code)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            leave(ended.code)
        raise
    except KeyboardInterrupt:
        print("raydist: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # `raydist runs | head`: the reader closed the pipe, so nothing more may be written to stdout.
        sys.stdout = None
        sys.exit(0)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            leave(crash.report(error))
        # The buffer cannot be written: without this, Python would report the error again at exit.
        sys.stdout = None
        print(f"raydist: stdout cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(3)
    except Exception as error:
        leave(crash.report(error))


_READING = frozenset(
    [
        "runs",
        "show",
        "logs",
        "stop",
        "rm",
        "watch",
        "trace",
        "report",
        "dashboard",
        "sample",
        "checkpoint",
        "schema",
        "faults",
        "init",
    ]
)
"""With `doctor` of a run: commands that run no code of the user: whatever a run's files or the working directory contain."""


def _set_imports(arguments: list[str]) -> None:
    """A command that trains or plans may import the user's modules from the working directory, after the installed packages."""
    here = os.getcwd()
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    command = _command(arguments)
    of_run = command == "doctor" and not any(argument.endswith((".yaml", ".yml")) for argument in arguments)
    trusted = not (command in _READING or of_run) or "--trust" in arguments
    registry.trust(trusted)
    if trusted or here == os.path.dirname(
        raydist.__path__[0]
    ):  # raydist itself may be imported from here, without being installed
        sys.path.append(here)


def _command(arguments: list[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _started(arguments: list[str] | None) -> bool:
    """Whether the command may have started something that storage has then stopped."""
    words = [word for word in (sys.argv[1:] if arguments is None else arguments) if not word.startswith("-")]
    return words[:1] in (["train"], ["run"], ["submit"], ["bench"], ["check"]) or (
        words[:1] == ["sweep"] and words[1:2] not in (["results"], ["best"], ["report"])
    )


def _run(arguments: list[str] | None) -> None:
    """Runs the command and flushes stdout."""
    try:
        bounded(typer.main.get_command(app))(arguments)
    except SystemExit:
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
