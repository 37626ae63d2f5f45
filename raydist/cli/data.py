"""`raydist data`: prepares corpora as datasets of token shards, checks datasets and shows their contents.

Runs in: the user's shell. Imports pyarrow and ray only inside commands.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from raydist.cli import options
from raydist.errors import UsageError, UserError
from raydist.printable import printable
from raydist.redact import redact

if TYPE_CHECKING:
    from raydist.data.chat_template import LossOn
    from raydist.data.index import DatasetIndex, Split
    from raydist.data.padding import Padding

app = typer.Typer(help="Prepare corpora as datasets, check them, show their contents.", no_args_is_help=True)

_Source = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC...",
        help="Files, folders, quoted globs or URIs; package.module:attribute; or python-stdlib.",
        show_default=False,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def prepare(
    sources: _Source,
    out: Annotated[str, typer.Option(help="Folder or URI of the dataset; on a cluster, one that all nodes share.")],
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:VOCAB, or the path or URI of a tokenizer.json.")] = "bytes",
    column: Annotated[str, typer.Option(help="Column that contains the text, in JSON lines and Parquet.")] = "text",
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of the documents held out for evaluation.")
    ] = 0.01,
    format: Annotated[str, typer.Option(help="text; or chat: rows have messages, or prompt and completion.")] = "text",
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="For chat: chatml, llama3, plain, or the path of a template; default: the one beside the tokenizer.json.",
            show_default=False,
        ),
    ] = None,
    loss_on: Annotated[str, typer.Option(help="For chat: completions (the assistant's text), or all.")] = "completions",
    address: Annotated[
        str | None,
        typer.Option(
            help="local: a private Ray; auto or HOST:PORT: a cluster. Default: local; a small corpus needs no Ray.",
            show_default=False,
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Prepare a dataset from these sources. The same command again completes an interrupted one."""
    from raydist.api import datasets
    from raydist.data import index
    from raydist.storage import Storage

    datasets.prepare_data.here(
        sources, out, tokenizer=tokenizer, column=column, eval_fraction=eval_fraction, format=format, chat_template=chat_template,
        loss_on=cast("LossOn", loss_on), address=address,
    )  # fmt: skip
    _print(out, index.read(Storage(out)), as_json)


@app.command()
def verify(
    dataset: Annotated[str, typer.Argument(metavar="DIR", help="Folder or URI of a dataset.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """Check every byte of a dataset against its hashes. Exit code 3 if a file is damaged; its name is printed."""
    from raydist.data.verify import verify as check

    damage, dataset = check(dataset), redact(dataset)
    if as_json:
        print(json.dumps({"path": dataset, "damaged": [{"file": d.file, "reason": d.reason} for d in damage]}))
    for damaged in damage:
        print(f"raydist: {dataset}/{damaged.file}: {printable(damaged.reason)}", file=sys.stderr)
    if damage:
        raise typer.Exit(3)
    if not as_json:
        print(f"{dataset}: all files match their hashes")


@app.command()
def show(
    dataset: Annotated[str, typer.Argument(metavar="DIR", help="Folder or URI of a dataset.", show_default=False)],
    job: Annotated[
        Path | None,
        typer.Option(
            metavar="JOB.yaml",
            help="Count the padding of the micro-batches that this job with data.batching makes of it.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of the --job, such as RUN/spec.yaml: the files of this step's global batch, and how its samples begin.",
            show_default=False,
        ),
    ] = None,
    document: Annotated[
        int | None,
        typer.Option(
            min=0, help="Also print this document; of conversations the first one is printed.", show_default=False
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="train or eval: the split that the document is in.")] = "train",
    trust: options.TrustData = False,
    as_json: _Json = False,
) -> None:
    """Show the contents of a dataset; with --job how its documents become micro-batches. Of a printed document what does not count
    in the loss is dimmed."""
    from raydist import registry
    from raydist.api.datasets import choice
    from raydist.data import index
    from raydist.storage import Storage

    registry.trust(trust)
    choice("--split", split, ("train", "eval"))
    found = index.read(Storage(dataset))
    if document is None and found.chat is not None:
        document = 0
    parts = _document(dataset, cast("Split", split), document) if document is not None else None
    if step is not None and job is None:
        raise UsageError("--step: of which job?", "give --job, such as RUN/spec.yaml")
    counted = _padding(dataset, job) if job is not None and step is None else None
    batch = _batch(dataset, job, step) if job is not None and step is not None else None
    _print(dataset, found, as_json, counted, parts, batch)


def _document(uri: str, name: Split, number: int) -> list[tuple[str, bool]]:
    """The text of a document in pieces, each with whether it counts in the loss."""
    import numpy as np

    from raydist.data.dataset import TokenDataset

    dataset = TokenDataset(uri)
    split = dataset.split(name)
    try:
        start, stop = split.document(number)
    except IndexError as error:
        raise UsageError(f"--document {number}: {error}", "numbers begin with 0") from None
    tokens = split.read(start, stop)
    counts = np.ones(len(tokens), bool) if split.counts is None else split.counts.read(start, stop) != 0
    pieces = np.split(tokens, np.flatnonzero(np.diff(counts)) + 1)
    first = bool(counts[0])
    return [(printable(dataset.tokenizer.decode(p)), first == (i % 2 == 0)) for i, p in enumerate(pieces)]


def _show_document(parts: list[tuple[str, bool]]) -> None:
    """On a terminal what does not count is dim; elsewhere what counts is between [[ and ]]."""
    from rich.console import Console
    from rich.text import Text

    console, shown = Console(highlight=False, soft_wrap=True), Text()
    for text, counts in parts:
        marked = f"[[{text}]]" if counts and not console.is_terminal else text
        shown.append(marked, style="" if counts else "dim")
    console.print(shown)


_STEPS = 100
_BEGIN = 40
"""Tokens of a sample that are printed."""


def _padding(dataset: str, path: Path) -> tuple[Padding, list[str]]:
    """The padding of the first global batches, and the notes of a run. Raises UserError."""
    from raydist.data.dataset import TokenDataset
    from raydist.data.padding import padding
    from raydist.data.samples import batches_of, training_samples
    from raydist.data.sequences import Sequences
    from raydist.spec import load

    job = load(path)
    samples = training_samples(job, opened := TokenDataset(dataset))
    if not isinstance(samples, Sequences):
        raise UserError(f"{path}: has no data.batching: its micro-batches have no padding", "leave --job out")
    batches = batches_of(job, samples, opened.fingerprint)
    return padding(samples, batches, job.cluster.most // job.parallel.replica, _STEPS), samples.notes()


def _batch(uri: str, path: Path, step: int) -> dict[str, Any]:
    """The global batch of a step. Raises UserError."""
    from raydist.data.batches import samples_hash
    from raydist.data.dataset import TokenDataset
    from raydist.data.samples import batches_of, training_samples
    from raydist.data.sequences import Sequences
    from raydist.spec import load

    job, dataset = load(path), TokenDataset(uri)
    samples = training_samples(job, dataset)
    batches = batches_of(job, samples, dataset.fingerprint)
    ids = batches.ids(batches.at_step(step - 1))
    lengths = samples.lengths(ids).tolist() if isinstance(samples, Sequences) else [_BEGIN] * len(ids)
    shown = []
    for at, length in enumerate(lengths):
        row = samples.batch(ids[at : at + 1])[0][0, : min(length, _BEGIN)]
        shown.append({"id": int(ids[at]), "begins": printable(dataset.tokenizer.decode(row))})
    files = [printable(redact(file)) for file in samples.files(ids)]
    return {"step": step, "samples_hash": samples_hash(ids), "files": files, "samples": shown}


def _print(
    uri: str,
    index: DatasetIndex,
    as_json: bool,
    counted: tuple[Padding, list[str]] | None = None,
    document: list[tuple[str, bool]] | None = None,
    batch: dict[str, Any] | None = None,
) -> None:
    from raydist.api.datasets import dataset_facts

    facts = dataset_facts(uri, index)
    if document is not None:
        facts["document"] = [{"text": text, "counts": counts} for text, counts in document]
    if counted is not None:
        found, notes = counted
        facts["padding"] = {"share": found.share, "notes": notes, **asdict(found)}
    if batch is not None:
        facts["batch"] = batch
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{facts['path']}: {index.fingerprint}")
    print(f"  sources    {', '.join(facts['sources'])}")
    print(f"  tokenizer  {facts['tokenizer']['name']}, {index.tokenizer.vocab_size} ids, stored as {index.dtype}")
    for name, split in (("train", index.train), ("eval", index.eval)):
        print(
            f"  {name:<9}  {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes:,} bytes of text, "
            f"{len(split.shards)} shards"
        )
    print(f"  unigram    {index.unigram_nats:.3f} nats per byte, on the eval split")
    if not index.has_block_hashes:
        print("  hashes     none of blocks: an older version prepared it, and changes are not noticed while training")
    if index.chat is not None:
        print(f"  loss on    {'what the assistant says' if index.chat.loss_on == 'completions' else 'all tokens'}")
    if counted is not None:
        _print_padding(*counted)
    if batch is not None:
        print(
            f"  batch      of step {batch['step']}, samples_hash {batch['samples_hash']}, in {', '.join(batch['files'])}"
        )
        for one in batch["samples"]:
            print(f"  {one['id']:>9}  {' '.join(one['begins'].split())}")
    if document is not None:
        print()
        _show_document(document)


def _print_padding(found: Padding, notes: list[str]) -> None:
    print(f"  padding    {found.share:.1%} of {found.padded:,} tokens in {found.steps} steps; {found.waits:.1%} more waits for the "
          f"fullest of {found.replicas} replicas")  # fmt: skip
    print(f"  {'length':>9}  {'micro-batches':>13}  {'sequences':>11}  {'tokens':>13}  padding")
    for length, part in found.by_length.items():
        print(f"  {length:>9,}  {part.micro_batches:>13,}  {part.sequences:>11,}  {part.tokens:>13,}  "
              f"{1 - part.tokens / part.padded:7.1%}")  # fmt: skip
    for note in notes:
        print(f"  {note}")
