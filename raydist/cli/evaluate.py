"""`raydist eval`: the held-out loss of a run's checkpoint, or of an exported folder.

Runs in: the user's shell, in one process without Ray. Imports torch inside the command.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options
from raydist.errors import UsageError
from raydist.run.directory import resolve


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("eval")(evaluate)


def evaluate(
    what: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's name, folder or URI; or an exported folder.", show_default=False),
    ],
    storage: options.Storage = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Prepared data. A run knows its own; an exported folder needs it.", show_default=False),
    ] = None,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; default: the newest.")] = None,
    batches: Annotated[int, typer.Option(min=1, help="Exported folders: batches of held-out samples.")] = 8,
    global_batch: Annotated[int, typer.Option(min=1, help="Exported folders: samples of a batch.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")] = False,
) -> None:
    """Compute the loss on held-out text, on the CPU, in one process."""
    folder = Path(what)
    exported = (folder / "config.json").exists()
    if exported and dataset is None:
        raise UsageError(f"{what}: which data?", "give --dataset, a folder of `raydist data prepare`")
    run = None if exported else resolve(what, storage)

    from raydist.data.dataset import TokenDataset
    from raydist.worker import saved_model

    if run is None:
        data = TokenDataset(str(dataset))
        model = saved_model.of_folder(folder)
        job = saved_model.job_of(model.spec, {"path": str(dataset)}, batches, global_batch)
        if data.tokenizer.to_bytes() != model.tokenizer.to_bytes() and data.tokenizer.name != "bytes":
            raise UsageError(f"--dataset {dataset}: was prepared with another tokenizer than {folder}/tokenizer.json",
                             "prepare the text with that one: raydist data prepare --tokenizer FOLDER/tokenizer.json")  # fmt: skip
    else:
        model, job, data = saved_model.of_run(run, step, dataset)
    found = saved_model.evaluate(model.module, job, data)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "bytes": model.nbytes}))
        return
    print(f"eval loss {found.loss:.4f} nats per token, over {found.tokens:,} tokens")
    print(f"{model.nbytes / 1e6:,.1f} MB of weights; {found.tokens_per_second:,.0f} tokens/s")
