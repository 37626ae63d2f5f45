"""`raydist data`: prepares corpora as datasets of token shards, checks datasets and shows their contents.

Runs in: the user's shell. Imports pyarrow and ray only inside commands.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydist.errors import UserError
from raydist.redact import redact

if TYPE_CHECKING:
    from raydist.data.index import DatasetIndex
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
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:VOCAB, or the path of a tokenizer.json.")] = "bytes",
    column: Annotated[str, typer.Option(help="Column that contains the text, in JSON lines and Parquet.")] = "text",
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of the documents held out for evaluation.")
    ] = 0.01,
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
    from raydist.cluster.data_prepare import RayMap
    from raydist.data.prepare import prepare as make
    from raydist.report.preparing import data_progress

    with RayMap(address) as map_files, data_progress(at_once=True) as report:
        index = make(
            sources,
            out,
            tokenizer,
            eval_fraction=eval_fraction,
            column=column,
            progress=report,
            map_files=map_files,
        )
    _print(out, index, as_json)


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
        print(f"raydist: {dataset}/{damaged.file}: {damaged.reason}", file=sys.stderr)
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
    as_json: _Json = False,
) -> None:
    """Show the contents of a dataset, from its index; with --job how its documents become micro-batches."""
    from raydist.data import index
    from raydist.storage import Storage

    found = index.read(Storage(dataset))
    counted = _padding(dataset, job) if job is not None else None
    _print(dataset, found, as_json, counted)


_STEPS = 100


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


def _print(uri: str, index: DatasetIndex, as_json: bool, counted: tuple[Padding, list[str]] | None = None) -> None:
    path = redact(uri)
    facts: dict[str, Any] = {
        "path": path,
        "fingerprint": index.fingerprint,
        "tokenizer": {k: getattr(index.tokenizer, k) for k in ("name", "vocab_size", "end")},
        "dtype": index.dtype,
        **{
            name: {"tokens": s.tokens, "documents": s.documents, "bytes": s.bytes, "shards": len(s.shards)}
            for name, s in (("train", index.train), ("eval", index.eval))
        },
        "unigram_nats": index.unigram_nats,
        "sources": list(index.sources),
        "eval_fraction": index.eval_fraction,
        "column": index.column,
    }
    if counted is not None:
        found, notes = counted
        facts["padding"] = {"share": found.share, "notes": notes, **asdict(found)}
    if as_json:
        print(json.dumps(facts))
        return
    print(f"{path}: {index.fingerprint}")
    print(f"  sources    {', '.join(index.sources)}")
    print(f"  tokenizer  {index.tokenizer.name}, {index.tokenizer.vocab_size} ids, stored as {index.dtype}")
    for name, split in (("train", index.train), ("eval", index.eval)):
        print(
            f"  {name:<9}  {split.tokens:,} tokens, {split.documents:,} documents, {split.bytes:,} bytes of text, "
            f"{len(split.shards)} shards"
        )
    print(f"  unigram    {index.unigram_nats:.3f} nats per byte, on the eval split")
    if counted is None:
        return
    print(f"  padding    {found.share:.1%} of {found.padded:,} tokens in {found.steps} steps; {found.waits:.1%} more waits for the "
          f"fullest of {found.replicas} replicas")  # fmt: skip
    print(f"  {'length':>9}  {'micro-batches':>13}  {'sequences':>11}  {'tokens':>13}  padding")
    for length, part in found.by_length.items():
        print(f"  {length:>9,}  {part.micro_batches:>13,}  {part.sequences:>11,}  {part.tokens:>13,}  "
              f"{1 - part.tokens / part.padded:7.1%}")  # fmt: skip
    for note in notes:
        print(f"  {note}")
