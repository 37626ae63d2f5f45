"""The vocabulary size of a job's tokenizer, before any data is prepared.

Runs in: the user's shell. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydist.errors import DataError

if TYPE_CHECKING:
    from raydist.spec.training import DataSpec


def vocabulary(data: DataSpec) -> int:
    """Number of ids of the job's tokenizer, including the end-of-document id. Raises DataError."""
    from raydist.data import index, tokenizers
    from raydist.storage import Storage

    try:
        if data.path is not None:
            return index.read(Storage(data.path)).tokenizer.vocab_size
        return tokenizers.vocabulary(data.tokenizer) or tokenizers.load(data.tokenizer).vocab_size
    except DataError as error:
        raise DataError(error.message, f"{error.hint}; or give --vocab SIZE") from error
