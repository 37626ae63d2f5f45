"""Options of several commands, with the same name and the same help in each.

Runs in: the user's shell. Must stay light.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from raydist.errors import UsageError
from raydist.run.directory import check_name


def named(name: str | None) -> str | None:
    """For options with a name: `--name "$NAME"` of an unset variable must not resume the run of the default name."""
    return None if name is None else check_name(name)


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job, such as optim.lr=3e-4."),
]
DeepSpeed = Annotated[
    Path | None,
    typer.Option(help="A DeepSpeed JSON file; it overrides the job's fields, but not --set.", show_default=False),
]
Name = Annotated[
    str | None, typer.Option(callback=named, help="Name of the run or sweep. The same name and storage resume it.")
]
Storage = Annotated[
    str | None,
    typer.Option(
        help="Folder or URI that holds the runs. Default: RAYDIST_STORAGE, config.toml, the nearest runs/, or ~/raydist.",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(help="local: a private Ray; auto or HOST:PORT: a cluster. Default: auto in a Ray job, else local."),
]
Until = Annotated[int | None, typer.Option(min=1, help="Pause after this step, with a checkpoint.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Delete an existing run of that name, and start from the beginning.")
]
Faults = Annotated[
    Path | None,
    typer.Option(help="A YAML list of faults to inject: see `raydist faults`.", show_default=False),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Ranks of a script: one process each, one GPU each where there are any. Default: 1.",
        show_default=False,
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option(help="CPUs of each worker of a script; also its torch threads on CPU.", show_default=False),
]
Gpus = Annotated[float | None, typer.Option(min=0, help="GPUs of each worker of a script.", show_default=False)]
Arguments = Annotated[list[str] | None, typer.Argument(help="A script's arguments, after --.", show_default=False)]
WaitForDriver = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long to wait for another driver of the same run or sweep to end, or its lease to expire; then the command fails.",
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard", help="Serve the run's live page to this machine while it trains, and print its address."
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code of your own that the run's spec names, such as its model: package.module:name."
    ),
]


TrustData = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code of your own that the dataset names, such as its tokenizer: package.module:name."
    ),
]


_MOST = (1 << 63) - 1
_NEEDS_TEXT = frozenset(
    [
        "-o",
        "--out",
        "--storage",
        "--address",
        "--host",
        "--memory",
        "--device",
        "--tokenizer",
        "--column",
        "--chat-template",
        "--working-dir",
        "--faults",
        "--deepspeed",
    ]
)
"""Options for which an empty text is never intended: a variable of the shell is not set. A path would be the working directory."""


def refuse_empty(words: Sequence[str]) -> None:
    """Raises UsageError for an option of _NEEDS_TEXT that is given an empty text; what follows "--" is a script's. `submit` needs
    its --address, and says itself which."""
    ours = list(words)[: list(words).index("--")] if "--" in words else list(words)
    for word, value in zip(ours, [*ours[1:], None], strict=True):
        name, given, text = word.partition("=")
        required = name == "--address" and ours[0] == "submit"
        if name in _NEEDS_TEXT and not required and (text if given else value) == "":
            raise UsageError(f"{name}: is empty", "give a value, or leave the option out")


def bounded(command: Any) -> Any:
    """The command of typer, whose options, and those of its sub-commands, refuse numbers that the machine does not compute with."""
    for inner in getattr(command, "commands", {}).values():
        bounded(inner)
    if command.callback is not None:
        command.callback = _checked(command.callback)
    return command


def _checked(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(**options: Any) -> Any:
        for name, value in options.items():
            if isinstance(value, (int, float)) and (not math.isfinite(value) or abs(value) > _MOST):
                shown = f"--{name.replace('_', '-')} {value!s:.40}"
                raise UsageError(f"{shown}: is not a number of 64 bits", "give another one")
        return callback(**options)

    return call


LastJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON on stdout at the end.")]
