"""What `raydist check`, `evaluate` and `data prepare` do.

Runs in: the process of the command, or one of its own. Imports ray and torch inside functions.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api.call import check_numbers, separate
from raydist.errors import StorageError, UsageError
from raydist.redact import redact
from raydist.registry import did_you_mean
from raydist.run.directory import default_storage
from raydist.storage import Storage

if TYPE_CHECKING:
    from raydist.data.chat_template import LossOn
    from raydist.data.index import DatasetIndex
    from raydist.spec.load import Job, Overrides

_NO_JOB = {"name": "check", "data": {"source": "none"}, "train": {"steps": 1}}
"""A job of one worker."""


@separate
def check(
    spec: Job | None = None,
    *,
    set: Overrides | None = None,
    storage: str | None = None,
    address: str | None = None,
    slow: float = 0.8,
) -> dict[str, Any]:
    """Measures every node, each link and the storage in about a minute: what `raydist check --json` prints, with the nodes that are
    below the share `slow` of the median. `spec`: a job; its cluster.resources, and whether it fits. Raises UserErrors."""
    check_numbers(1, slow=(slow, 0.01))
    from raydist.cluster import check as measured
    from raydist.cluster.place import where
    from raydist.cluster.run.request import worker_env
    from raydist.cluster.session import open_session
    from raydist.spec import load

    job = load(_NO_JOB if spec is None else spec, set or {})
    home = _writable(Storage(storage or default_storage()))
    with (
        tempfile.TemporaryDirectory(prefix="raydist-logs-") as logs,
        open_session(where(address), env=worker_env(job), log_dir=Path(logs)) as session,
    ):
        return measured.run(job, session, home.full_uri, slow)


def _writable(home: Storage) -> Storage:
    """Raises UsageError if it is not, before anything is started: so exit code 3 means a slow node."""
    mark = f".check-{uuid.uuid4().hex[:8]}"
    try:
        home.write(mark, b"")
        home.delete(mark)
    except StorageError as error:
        raise UsageError(error.message, "give a --storage that can be written") from error
    return home


@separate
def evaluate(
    folder: str | Path, data: str | Path, *, context: int | None = None, batches: int = 8, sequences: int = 8
) -> dict[str, float]:
    """The held-out loss of weights that `Run.export` wrote, in nats per token, on a dataset of `prepare_data`, and the speed:
    {"loss", "tokens", "tokens_per_second"}. `context`: tokens of a sequence. Imports torch. Raises UserErrors."""
    check_numbers(context=(context, 1), batches=(batches, 1), sequences=(sequences, 1))
    from raydist.data.dataset import TokenDataset
    from raydist.worker import exported
    from raydist.worker.evaluate import evaluate_folder

    if not exported.is_exported(str(folder)):
        raise UsageError(f"{folder}: has no config.json", "give a folder of `raydist checkpoint export`")
    found = evaluate_folder(exported.open_folder(Path(folder), context), TokenDataset(str(data)), batches, sequences)
    return {"loss": found.loss, "tokens": found.tokens, "tokens_per_second": found.tokens_per_second}


@separate
def prepare_data(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    column: str = "text",
    eval_fraction: float = 0.01,
    format: str = "text",
    chat_template: str | None = None,
    loss_on: LossOn = "completions",
    address: str | None = None,
) -> dict[str, Any]:
    """Prepares a dataset in the folder or URI `out`, as `raydist data prepare` does, whose options these are. The same call again
    completes an interrupted one. Returns what `raydist data show --json` prints. Raises DataError."""
    from raydist.cluster.data_prepare import RayMap
    from raydist.data.chat_template import chat_format
    from raydist.data.prepare import prepare
    from raydist.report.preparing import data_progress

    check_numbers(0.99, eval_fraction=(eval_fraction, 0))
    choice("--format", format, ("text", "chat"))
    choice("--loss-on", loss_on, ("completions", "all"))
    chat = chat_format(chat_template, tokenizer, loss_on) if format == "chat" else None
    named = [sources] if isinstance(sources, str | Path) else sources
    with RayMap(address) as map_files, data_progress(at_once=True) as report:
        index = prepare(
            [str(each) for each in named], str(out), tokenizer, eval_fraction=eval_fraction, column=column, chat=chat,
            progress=report, map_files=map_files,
        )  # fmt: skip
    return dataset_facts(str(out), index)


def dataset_facts(uri: str, index: DatasetIndex) -> dict[str, Any]:
    """A dataset, as `raydist data show --json` prints it."""
    return {
        "path": redact(uri),
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
        "block_hashes": index.has_block_hashes,
        **({"chat": index.chat.to_dict()} if index.chat is not None else {}),
    }


def choice(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UsageError if the value of an option is none of these."""
    if value not in known:
        raise UsageError(f"{option} {value}: unknown", did_you_mean(value, list(known)))
