"""Text to token ids and back: bytes by default, byte-level BPE through the `tokenizers` library.

Runs anywhere. `tokenizers` is imported only where a BPE is used.

    bytes                 ids 0..255 are the bytes, 256 ends a document; any UTF-8, nothing to train
    bpe:VOCAB             a byte-level BPE of that many ids, trained on the corpus itself (its train split)
    PATH/tokenizer.json   a trained one, of any kind, as the `tokenizers` and `transformers` libraries save it

Text that spells a special token ("<|endoftext|>") is encoded as text: a document cannot forge the end of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raydist.errors import DataError

TokenArray = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]
END = "<|endoftext|>"
_KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<end_of_text>", "[EOS]", "[SEP]")
_BYTES_FILE = b'{"type": "bytes"}\n'


class Tokenizer(Protocol):
    """What prepares and reads a corpus. Documents are UTF-8, checked before they come here."""

    @property
    def name(self) -> str:
        """As it was asked for."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size), the end included."""

    @property
    def end(self) -> int:
        """The id that ends a document; `encode` never yields it."""

    def encode(self, documents: Sequence[bytes | str]) -> list[TokenArray]:
        """Token ids of each document, without an end."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of these ids; ends are left out, what is no UTF-8 becomes U+FFFD."""

    def to_bytes(self) -> bytes:
        """The file that `from_bytes` reads."""


class Bytes:
    """One token a byte, and 256 for the end of a document."""

    name, vocab_size, end = "bytes", 257, 256

    def encode(self, documents: Sequence[bytes | str]) -> list[TokenArray]:
        """Token ids of each document, uint16, without an end."""
        raw = [d.encode() if isinstance(d, str) else d for d in documents]
        return [np.frombuffer(d, dtype=np.uint8).astype(np.uint16) for d in raw]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of these ids."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

    def to_bytes(self) -> bytes:
        """Its name is all there is to keep."""
        return _BYTES_FILE


class Library:
    """A tokenizer of the `tokenizers` library, from its JSON. Raises DataError if that is none.

    The end is the first of the usual special tokens that it has; else one is added, which makes the
    vocabulary larger by one.
    """

    def __init__(self, name: str, raw: bytes) -> None:
        import tokenizers

        self.name: str = name
        try:
            self._inner: Any = tokenizers.Tokenizer.from_str(raw.decode())
        except Exception as error:  # The library raises a bare Exception.
            raise DataError(
                f"tokenizer {name}: {error}", "give a tokenizer.json of the `tokenizers` library"
            ) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.encode_special_tokens = True
        ends = [t for t in _KNOWN_ENDS if self._inner.token_to_id(t) is not None]
        if not ends:
            self._inner.add_special_tokens([END])
        found: int | None = self._inner.token_to_id(ends[0] if ends else END)
        assert found is not None
        self.end: int = found
        # Ids may have gaps: the largest one decides.
        self.vocab_size: int = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Sequence[bytes | str]) -> list[TokenArray]:
        """Token ids of each document, uint32, without an end; the library uses all cores."""
        texts = [d if isinstance(d, str) else d.decode() for d in documents]
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of these ids."""
        return str(self._inner.decode([int(i) for i in ids if int(i) != self.end], skip_special_tokens=False))

    def to_bytes(self) -> bytes:
        """The library's own JSON."""
        return str(self._inner.to_str(pretty=False)).encode()


def vocabulary(name: str) -> int | None:
    """VOCAB of "bpe:VOCAB"; None for other names. Raises DataError where it is no number, or none that can
    be."""
    if not name.startswith("bpe:"):
        return None
    size = int(name[4:]) if re.fullmatch(r"\d{1,9}", name[4:]) else 0
    if size < 257:
        raise DataError(f"tokenizer {name!r}: the vocabulary must be a number from 257 on", "try bpe:8192")
    return size


def train(name: str, texts: Iterator[str]) -> Library:
    """The BPE that `name` ("bpe:VOCAB") asks for, trained on these texts: the same texts, the same tokenizer.

    Byte-level, with the pattern of GPT-2 for words; 256 ids for the bytes and one for the end come first.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    size = vocabulary(name)
    assert size is not None, name
    inner: Any = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return Library(name, inner.to_str(pretty=False).encode())


def from_bytes(name: str, raw: bytes) -> Tokenizer:
    """The tokenizer of a prepared dataset, from its tokenizer.json. Raises DataError."""
    return Bytes() if raw == _BYTES_FILE else Library(name, raw)


def load(name: str) -> Tokenizer:
    """ "bytes", or a tokenizer.json by its path. Raises DataError; a "bpe:VOCAB" is trained first
    (`train`)."""
    if name == "bytes":
        return Bytes()
    if vocabulary(name) is not None:
        raise DataError(f"tokenizer {name!r} is trained with the corpus", "prepare a dataset with it, and load that")
    try:
        return Library(name, Path(name).expanduser().read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"tokenizer {name!r}: {reason}",
            'there are: "bytes", "bpe:VOCAB" such as bpe:8192, or the path of a tokenizer.json',
        ) from error
