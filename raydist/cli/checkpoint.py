"""`raydist checkpoint`: lists, makes, checks and prunes a run's checkpoints, and exports weights.

Runs in: the user's shell. Imports torch only inside `export`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from raydist.cli import options
from raydist.errors import UsageError
from raydist.printable import printable
from raydist.run.directory import RunDir, resolve

app = typer.Typer(help="List, make, check, prune and export a run's checkpoints.", no_args_is_help=True)

_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, folder or URI.", show_default=False)]
_Step = Annotated[int | None, typer.Option(help="The checkpoint of this step.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]


@app.command("list")
def list_(run: _Run, storage: options.Storage = None, as_json: _Json = False) -> None:
    """List a run's committed checkpoints, oldest first."""
    from raydist.checkpoint import manifest

    folder = resolve(run, storage)
    rows = manifest.summary(folder)
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print(f"{folder.uri}: no checkpoint is committed yet")
        return
    print(f"{'step':>10}  {'MiB':>10}  {'eval loss':>10}  {'ranks':>5}  saved")
    for row in rows:
        print(_line(row))


def _line(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"{row['step']:>10}  cannot be read: {row['problem']}"
    loss = "-" if row["eval_loss"] is None else f"{row['eval_loss']:.4f}"
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved_at"]))
    best = "  best" if row["best"] else ""
    return f"{row['step']:>10}  {row['bytes'] / 2**20:>10.1f}  {loss:>10}  {row['world_size']:>5}  {saved}{best}"


@app.command()
def now(
    run: _Run,
    storage: options.Storage = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for it.")] = 600.0,
    as_json: _Json = False,
) -> None:
    """Have a run that is training save a checkpoint after its present step, and wait until it is committed."""
    from raydist.checkpoint.on_request import save_now

    folder = resolve(run, storage)
    step = save_now(folder, timeout, "`raydist checkpoint now`")
    print(json.dumps({"step": step}) if as_json else f"run {folder.name}: checkpoint of step {step}")


@app.command()
def verify(
    run: _Run,
    step: _Step = None,
    replay: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Train so many steps after the checkpoint again, on another number of workers, and compare every bit.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --replay: workers, on this machine; default: those of one replica, or of two if one trained them.",
        ),
    ] = None,
    trust: options.Trust = False,
    storage: options.Storage = None,
    as_json: _Json = False,
) -> None:
    """Check every byte of a run's checkpoints against their hashes. Exit code 3 if a file is bad; its name is printed.

    --replay trains instead: a proof that the run has the same bits at any number of workers (train.virtual_ranks), or that this
    machine computes what the other did. Exit code 3 if anything differs.
    """
    from raydist.checkpoint import retention

    folder = resolve(run, storage)
    if workers is not None and replay is None:
        raise UsageError("--workers: bytes are checked without workers", "give --replay STEPS, too")
    if replay is not None:
        _replay(folder, replay, step, workers, trust, as_json)
        return
    checked: list[dict[str, Any]] = []
    for one in retention.verified(folder, step):
        checked.append(one)
        if not as_json:
            print(f"step {one['step']}: {'all bytes match their hashes' if one['good'] else 'bad'}")
        for problem in one["problems"]:
            print(f"raydist: {printable(problem)}", file=sys.stderr)
    if as_json:
        print(json.dumps(checked))
    elif not checked:
        print(f"{folder.uri}: no checkpoint is committed yet")
    if not all(c["good"] for c in checked):
        raise typer.Exit(3)


def _replay(folder: RunDir, steps: int, step: int | None, workers: int | None, trust: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from raydist.launch.replay import replay

    made = replay(folder, steps, step, workers, trust)
    if as_json:
        print(json.dumps(asdict(made)))
    else:
        before = " and ".join(map(str, made.before))
        what = f"losses, gradient norms and {made.tensors} tensors" if made.tensors else "losses and gradient norms"
        says = f"{len(made.differences)} differences" if made.differences else f"the same {what}, to the bit"
        print(f"steps {made.first} to {made.last}: trained on {before} workers, and again on {made.workers}: {says}")
        for line in made.differences[:20]:
            print(f"raydist: {printable(line)}", file=sys.stderr)
    if made.differences:
        raise typer.Exit(3)


@app.command()
def prune(
    run: _Run,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Newest checkpoints to keep, besides the best; default: the run's own.")
    ] = None,
    storage: options.Storage = None,
    as_json: _Json = False,
) -> None:
    """Delete all checkpoints but the newest ones, the best by eval loss, and those being read.

    What is kept is read before anything is deleted: a damaged checkpoint is kept, but not counted in --keep.
    """
    from raydist.api.runs import Run

    folder = resolve(run, storage)
    pruned = Run(folder).prune(
        keep,
        lambda problem: print(f"raydist: {printable(problem)}; it is kept, but not counted in --keep", file=sys.stderr),
    )
    left = folder.committed()
    if as_json:
        print(json.dumps({"pruned": pruned, "left": left}))
    else:
        print(
            f"{folder.uri}: pruned {', '.join(map(str, pruned)) or 'nothing'}; left {', '.join(map(str, left)) or 'nothing'}"
        )


@app.command()
def export(
    run: _Run,
    out: Annotated[Path, typer.Option(help="Folder to write to.", show_default=False)],
    step: _Step = None,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="huggingface, or safetensors, which is the same: weights, config and tokenizer for transformers; adapters are "
            "added to the weights. peft: the adapters alone.",
        ),
    ] = "huggingface",
    dataset: Annotated[
        str | None,
        typer.Option(
            help="The run's prepared data, if it has moved; its tokenizer is exported too.", show_default=False
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="int8: linear layers with 8 bits. Prints size, held-out loss and speed, before and after.",
            show_default=False,
        ),
    ] = None,
    max_loss_increase: Annotated[
        float,
        typer.Option(
            min=0.0, help="With --quantize: nats by which the held-out loss may rise; else nothing is written."
        ),
    ] = 0.05,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; default: as saved, which is fp32.", show_default=False)
    ] = None,
    file_mb: Annotated[
        float, typer.Option(min=0.001, help="Size of a file of weights in MB; more go to further files.")
    ] = 5000.0,
    storage: options.Storage = None,
) -> None:
    """Write a checkpoint's weights for other libraries. Default: the newest valid checkpoint."""
    folder = resolve(run, storage)
    if quantize is not None:
        if quantize != "int8":
            raise UsageError(f"--quantize {quantize}: cannot be written", "there is: int8")
        if file_format == "peft":
            raise UsageError("--format peft: adapters are not quantized", "leave out one of --quantize and --format")
        from raydist.worker.checkpoint.export_int8 import export_int8

        written = {"dtype": dtype, "file_bytes": int(file_mb * 1e6)}
        print("\n".join([*export_int8(folder, step, out, dataset, max_loss_increase, **written).lines(), str(out)]))
        return
    from raydist.worker.checkpoint.export import export as write

    print(write(folder, step, out, file_format, dataset, dtype=dtype, file_bytes=int(file_mb * 1e6)))
