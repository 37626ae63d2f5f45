"""The `raydist` command: its sub-commands, and what its exit codes mean.

Runs in: the user's shell. Must stay light: `raydist --help` answers in half a second.

0: done. 2: what was asked cannot be done; nothing was started. 3: the training stopped. 130, 143: interrupted by SIGINT or SIGTERM.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from raydist import __version__
from raydist.cli import (
    bench,
    checkpoint,
    convert,
    data,
    faults,
    init,
    logs,
    plan,
    profile,
    report,
    rm,
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
from raydist.cluster.head_monitor import leave
from raydist.errors import RaydistError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What a write to stdout may end with, where that is a file on a disk."""

app = typer.Typer(
    name="raydist",
    help="Trains PyTorch models on a Ray cluster, and gets them to the end.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
init.register(app)
train.register(app)
submit.register(app)
runs.register(app)
stop.register(app)
logs.register(app)
rm.register(app)
watch.register(app)
profile.register(app)
trace.register(app)
report.register(app)
sample.register(app)
schema.register(app)
plan.register(app)
faults.register(app)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(convert.app, name="convert")
app.add_typer(bench.app, name="bench")
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
    """Trains PyTorch models on a Ray cluster, and gets them to the end."""


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits with its code. What raydist raises becomes one clear message on stderr."""
    try:
        # The user's own modules are found from where the command is called, as `python -m raydist` finds them.
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)
    except FileNotFoundError:
        print("raydist: the working directory is gone\n  go to one that is there: cd", file=sys.stderr)
        sys.exit(2)
    try:
        _run(arguments)
    except RaydistError as error:
        print(f"raydist: {error}", file=sys.stderr)
        leave(error.exit_code)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            leave(ended.code)
        raise
    except KeyboardInterrupt:
        print("raydist: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # `raydist runs | head`: the reader has seen enough. Nothing may be written to stdout any more.
        sys.stdout = None
        sys.exit(0)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        # What is still buffered can never be written: Python would say so once more at its end.
        sys.stdout = None
        print(f"raydist: stdout cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(3)


def _run(arguments: list[str] | None) -> None:
    """The command; what it printed has then been written."""
    try:
        app(arguments)
    except SystemExit:
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
