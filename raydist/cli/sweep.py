"""`raydist sweep FILE`: trains many jobs from one file; `results`, `best` and `report` show them.

Runs in: the user's shell, or a Ray job's driver. Imports ray, pyarrow and rich in functions; never torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raydist.cli import options, output
from raydist.errors import StorageError, UsageError
from raydist.printable import printable


class _FileFirst(TyperGroup):
    """Makes `raydist sweep FILE` mean `raydist sweep run FILE`. A file named like a command is given as ./results."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_FileFirst,
    help="Train many jobs that differ in a few fields, from one file: raydist sweep FILE.",
    no_args_is_help=True,
    subcommand_metavar="FILE | COMMAND [ARGS]...",
)

_Name = Annotated[str, typer.Argument(help="A sweep's name, or its folder's path or URI.", show_default=False)]


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="The sweep: a YAML file.", show_default=False)],
    overrides: options.Overrides = None,
    name: options.Name = None,
    storage: options.Storage = None,
    address: options.Address = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check it, and show its cells and their estimated time.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run: GPU to estimate for, such as h100. Default: the slowest at --address, else this machine's."
        ),
    ] = None,
    wait_for_driver: options.WaitForDriver = 0.0,
    as_json: options.LastJson = False,
) -> None:
    """Train a sweep. The same command again resumes it."""
    from raydist.api import sweep_training

    if device is not None and not dry_run:
        raise UsageError(f"--device {device} needs --dry-run", "leave it out: training uses the cluster's GPUs")
    if not dry_run:
        code = sweep_training.train(
            file, set=overrides, name=name, storage=storage, address=address, wait_for_driver=wait_for_driver,
            show=lambda summary: _show(summary, as_json, failures=False),  # they come last
        )  # fmt: skip
        raise typer.Exit(code)

    def show(estimate: dict[str, Any]) -> None:
        from raydist.report.sweep import tables

        print(json.dumps(estimate, allow_nan=False)) if as_json else tables.forecast(estimate)

    sweep_training.forecast(file, set=overrides, name=name, storage=storage, address=address, device=device, show=show)


def _show(summary: dict[str, Any], as_json: bool, *, failures: bool = True) -> None:
    from raydist.report.sweep import tables

    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        tables.results(summary, failures=failures)


@app.command()
def results(
    name: _Name,
    storage: options.Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV, one row per point, floats exact.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table.")] = False,
) -> None:
    """Show a sweep's results, one row per point, also while it runs; and write results.parquet into its folder."""
    if as_json + as_csv + as_markdown > 1:
        raise UsageError("--json, --csv and --markdown exclude one another", "give one of them, or none for a table")
    from raydist.report.sweep import tables
    from raydist.report.sweep.results import tell, write_parquet
    from raydist.run.sweep_directory import resolve_sweep

    folder = resolve_sweep(name, storage)
    summary = tell(folder)
    try:
        write_parquet(folder, summary)
    except StorageError as error:
        print(f"raydist: results.parquet was not updated: {error.message}", file=sys.stderr)
    if as_csv:
        print(tables.as_csv(summary), end="")
    elif as_markdown:
        print(tables.markdown(summary))
    else:
        _show(summary, as_json)


@app.command()
def best(
    name: _Name,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write. Default: stdout.", show_default=False)
    ] = None,
    storage: options.Storage = None,
) -> None:
    """Write the job of a sweep's best cell, ready to train."""
    from raydist.report.sweep.results import best_job, tell
    from raydist.run.sweep_directory import resolve_sweep
    from raydist.spec import dump

    folder = resolve_sweep(name, storage)
    job, comments = best_job(folder, tell(folder))
    text = printable("".join(f"# {line}\n" for line in comments) + dump(job))
    if out is None:
        print(text, end="")
        return
    output.write(out, text)


@app.command()
def report(
    name: _Name,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="File to write. Default: report.html in the sweep's folder.", show_default=False
        ),
    ] = None,
    storage: options.Storage = None,
) -> None:
    """Write one offline HTML page about a sweep, also while it runs."""
    from raydist.api.sweeps import Sweep
    from raydist.run.sweep_directory import resolve_sweep

    print(Sweep(resolve_sweep(name, storage)).report(None if out is None else str(out)))
