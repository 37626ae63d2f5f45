"""What `raydist data prepare` does, and a dataset as it is shown.

Runs in: the process of the command, or one of its own. Imports ray inside functions; never torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.api.call import check_numbers, separate
from raydist.errors import UsageError
from raydist.printable import printable
from raydist.redact import redact
from raydist.registry import did_you_mean

if TYPE_CHECKING:
    from raydist.data.chat_template import LossOn
    from raydist.data.index import DatasetIndex


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
    facts: dict[str, Any] = {
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
    return printable(facts)


def choice(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raises UsageError if the value of an option is none of these."""
    if value not in known:
        raise UsageError(f"{option} {value}: unknown", did_you_mean(value, list(known)))
