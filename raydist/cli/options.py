"""Options that several commands have: the same name and the same help everywhere.

Runs in: the user's shell. Must stay light.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job, such as optim.lr=3e-4."),
]
DeepSpeed = Annotated[
    Path | None,
    typer.Option(help="A DeepSpeed JSON file; it beats the job's own fields, but not --set.", show_default=False),
]
Name = Annotated[str | None, typer.Option(help="Name of the run, or sweep. The same name and storage go on with it.")]
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
Until = Annotated[int | None, typer.Option(min=1, help="End after this step, with a checkpoint, as paused.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete what is there of that name, and start anew.")]
Faults = Annotated[
    Path | None,
    typer.Option(help="A YAML list of what is to go wrong on the way: see `raydist faults`.", show_default=False),
]
WaitForDriver = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How long to wait for another driver of it to end, or to be missed, before this one is refused.",
    ),
]
LastJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")]
