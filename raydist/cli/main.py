"""The `raydist` command: its sub-commands and its exit codes.

Runs in: the user's shell. Must stay light: `raydist --help` answers in half a second.

0: success. 2: invalid request; nothing was started. 3: the training stopped. 70: an error of raydist itself
(raydist/api/crash.py). 129, 130, 143: interrupted by SIGHUP, SIGINT or SIGTERM.
"""

from __future__ import annotations

import copy
import errno
import functools
import sys
from typing import Annotated, Any

import typer

from raydist import __version__
from raydist.api import process
from raydist.cli import (
    bench,
    check,
    checkpoint,
    convert,
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
from raydist.cli.options import bounded, refuse_empty

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
    """Runs a command and exits with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    process.run(lambda: _run(arguments), trusted=_trusted(words), started=_started(words))


_READING = frozenset(
    [
        "runs",
        "show",
        "logs",
        "stop",
        "rm",
        "watch",
        "profile",
        "trace",
        "report",
        "dashboard",
        "doctor",
        "sample",
        "evaluate",
        "checkpoint",
        "data show",
        "data verify",
        "sweep results",
        "sweep best",
        "sweep report",
        "schema",
        "faults",
        "init",
    ]
)
"""Commands that run no code of the user: whatever a run's files or the working directory contain. But for `doctor` of a job."""


def _trusted(arguments: list[str]) -> bool:
    """Whether the command may run the user's own code: it trains or plans, or has --trust."""
    words = [argument for argument in arguments if not argument.startswith("-")][:2]
    reads = not _READING.isdisjoint([*words[:1], " ".join(words)])
    return (
        not reads or "--trust" in arguments or (arguments[:1] == ["doctor"] and doctor.is_job(_target(arguments[1:])))
    )


def _target(arguments: list[str]) -> str | None:
    """The target among doctor's arguments, which may also be the values of options."""
    only = typer.Typer(add_completion=False)
    only.command()(doctor.doctor)
    with typer.main.get_command(only).make_context("doctor", list(arguments), resilient_parsing=True) as context:
        target: str | None = context.params.get("target")
        return target


def _started(arguments: list[str]) -> bool:
    """Whether the command may have started something that storage has then stopped."""
    words = [word for word in arguments if not word.startswith("-")]
    return words[:1] in (["train"], ["run"], ["submit"], ["bench"], ["check"]) or (
        words[:1] == ["sweep"] and words[1:2] not in (["results"], ["best"], ["report"])
    )


@functools.cache
def _command(first: str) -> Any:
    """The command line; with one command alone if the first word names it, because typer takes 65 ms to make all of them."""
    called = copy.copy(app)
    commands = [each for each in app.registered_commands if each.callback and each.callback.__name__ == first]
    groups = [each for each in app.registered_groups if each.name == first]
    if commands or groups:
        called.registered_commands, called.registered_groups = commands, groups
    return bounded(typer.main.get_command(called))


def _run(arguments: list[str] | None) -> None:
    """Runs the command and flushes stdout."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        refuse_empty(words)
        _command(words[0] if words else "")(arguments)
    except SystemExit as ended:
        cause = ended.__context__
        if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
            raise cause from None  # typer exits with 1 for it, without a word; raydist/api/process.py knows whose pipe it is
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
