"""`raydist convert`: converts another trainer's configuration to a raydist job file.

Runs in: the user's shell. Imports neither ray nor torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli.output import write
from raydist.errors import SpecError, UsageError

app = typer.Typer(help="Convert another trainer's configuration to a job file.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Convert another trainer's configuration to a job file."""


@app.command()
def deepspeed(
    config: Annotated[
        Path, typer.Argument(metavar="FILE", help="A DeepSpeed JSON file, such as ds_config.json.", show_default=False)
    ],
    spec: Annotated[
        Path | None,
        typer.Option(
            help="The job that uses it; its workers relate the batch sizes. The result extends this job.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file; default: stdout.", show_default=False)
    ] = None,
) -> None:
    """Convert a DeepSpeed file to the YAML of a job, with comments on options without a counterpart."""
    import yaml

    from raydist.spec import load, read_tree
    from raydist.spec.deepspeed import convert
    from raydist.spec.models import flatten

    head = ""
    read = {config.resolve()}
    if spec is None:
        converted = convert(config)
    else:
        tree, origin = read_tree(spec)
        read |= {spec.resolve(), *(Path(place).resolve() for place in origin.values())}
        other = tree.pop("deepspeed", None)
        converted = convert(config, flatten(tree))
        if not converted.problems:
            load(spec, deepspeed=config, warn=lambda line: None)  # report conflicts now
        parent = os.path.relpath(spec, Path() if output is None else output.parent)
        head = yaml.safe_dump({"extends": parent}, allow_unicode=True, width=1 << 20)
        if other is not None:
            head += "deepspeed: null  # its settings are below\n"
    if converted.problems:
        raise SpecError("\n".join(converted.problems))
    if output is not None and output.resolve() in read:
        raise UsageError(
            f"-o {output}: is one of the files that are converted", "give another name: the result extends them"
        )
    text = converted.to_yaml(head)
    if output is None:
        print(text, end="")  # its comments contain the warnings
        return
    for line in converted.warnings():
        print(f"raydist: {line}", file=sys.stderr)
    write(output, text)
