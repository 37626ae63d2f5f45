"""The manifest of a committed checkpoint: one canonical JSON file that names every shard, its size and its hash.

Runs anywhere: plain python, no torch. The driver and the command line read checkpoints through it.

MANIFEST-<attempt>.json is written atomically and last. It ends with the hash of all bytes before: a flipped byte in the manifest is
found like one in a shard.

    version 1   has no `mesh`: all ranks were data parallel
    version 2   `mesh`: the axes of the ranks that saved it, and their sizes
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import xxhash

from raydist.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointTooNew, StorageError
from raydist.parsing import DAMAGED, parse_json
from raydist.run.directory import RunDir, manifest_attempt, step_folder
from raydist.storage import Storage, inside

VERSION = 2
"""Of the manifests that this raydist writes. It reads all versions up to this one."""
MOST_BYTES = 768 << 20
"""Of a manifest: about 80 bytes for each rank's part of each tensor. In a message of 1 GiB all ranks get it."""
EVAL = "EVAL.json"
"""Beside the manifest, which never changes: the eval loss, where it became known after the commit."""
READ_BYTES = 8 << 20
SHOWN = 10
"""Steps that an error lists."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of one tensor, as raw little-endian bytes in row-major order: `length` bytes from `start` of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: dtype as torch spells it without `torch.`, its whole shape, and the chunks that cover it once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One shard: its size, and the xxh3-128 of its bytes in hex."""

    bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint after `step` updates, saved by `world_size` ranks.

    `plain`: the part of the state that is not tensors (cursor, loss scale, ...). `numbers`: the spec's fields that change the
    numbers. `eval_loss`: the held-out loss of this state, if it was measured. `saved_at`: Unix time. `mesh`: see `mesh_of`; rank r
    is the row-major index of its coordinate, with the axes in the order pipeline, data, context, tensor.
    """

    step: int
    world_size: int
    attempt: int
    saved_at: float
    spec_hash: str
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    plain: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    eval_loss: float | None = None
    version: int = VERSION
    mesh: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", mesh_of(self.mesh, self.world_size))

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return sum(f.bytes for f in self.files.values())

    def dumps(self) -> bytes:
        """The file's content: canonical JSON with its own hash."""
        body: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.version == 1:
            del body["mesh"]
        body["files"] = {n: [f.bytes, f.xxh3] for n, f in self.files.items()}
        body["tensors"] = {
            name: [t.dtype, t.shape, [[c.offsets, c.sizes, c.file, c.start, c.length] for c in t.chunks]]
            for name, t in self.tensors.items()
        }
        return _signed(canonical(body))

    @classmethod
    def loads(cls, data: bytes, *, tensors: bool = True) -> Manifest:
        """The inverse of `dumps`. Raises ValueError, with the reason, for anything that `dumps` did not write; CheckpointTooNew for
        a version that this raydist does not know. `tensors`: False leaves them out, which are nearly all of it.
        """
        signed = data[:-_HASH_BYTES] + b"}"
        if _signed(signed) != data:
            raise ValueError("does not end with the hash of its bytes")
        try:
            body = _body(signed, tensors)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError("is not JSON") from error
        if body.get("version") not in range(1, VERSION + 1):
            raise CheckpointTooNew(
                f"has version {body.get('version')!r:.40}; this raydist reads versions 1 to {VERSION}",
                "use the raydist that wrote it, or newer",
            )
        try:
            return cls._of(body)
        except DAMAGED as error:  # it has a hash, and yet other fields
            raise ValueError(f"is no manifest: {type(error).__name__}: {error}") from None

    @classmethod
    def _of(cls, body: dict[str, Any]) -> Manifest:
        body.setdefault("mesh", {})
        body["files"] = {inside(name): FileEntry(*entry) for name, entry in body["files"].items()}
        body["tensors"] = {
            name: TensorEntry(dtype, tuple(shape), tuple(Chunk(tuple(o), tuple(s), *place) for o, s, *place in chunks))
            for name, (dtype, shape, chunks) in body["tensors"].items()
        }
        found = cls(**{f.name: body[f.name] for f in fields(cls)})
        found._check()
        return found

    def _check(self) -> None:
        """Raises ValueError for values of other types: who wrote it may have computed the hash, too."""
        numbers = [self.step, self.world_size, self.attempt, *self.mesh.values()]
        for shard in self.files.values():
            numbers.append(shard.bytes)
        texts = [self.spec_hash, *self.versions.values(), *(f.xxh3 for f in self.files.values())]
        for entry in self.tensors.values():
            texts.append(entry.dtype)
            numbers += entry.shape
            for chunk in entry.chunks:
                numbers += [*chunk.offsets, *chunk.sizes, chunk.start, chunk.length]
                texts.append(chunk.file)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("a step, a size or an offset is not a number")
        if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in (self.saved_at, self.eval_loss or 0.0)):
            raise ValueError("a time or a loss is not a number")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a hash, a dtype, a version or a file is not text")
        if not isinstance(self.plain, dict) or not isinstance(self.numbers, dict):
            raise ValueError("plain or numbers is not a mapping")


def _body(signed: bytes, tensors: bool) -> dict[str, Any]:
    """A manifest as JSON. `tensors`: False has none of them, and parses none where the text shows where they are."""
    before, behind = signed.find(b',"tensors":{'), signed.rfind(b',"version":')
    if not tensors and 0 < before < behind:
        with suppress(ValueError):  # the text was found inside of another value
            found: dict[str, Any] = parse_json(signed[:before] + b',"tensors":{}' + signed[behind:])
            if {"step", "versions"} <= found.keys():  # else of two others
                return found
    body: dict[str, Any] = parse_json(signed, MOST_BYTES)
    return body if tensors else {**body, "tensors": {}}


def mesh_of(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Axis -> size, as two meshes are compared: `data` always, the others if they are larger than 1. {}: all ranks are data
    parallel.
    """
    if not sizes:
        return {"data": world_size}
    assert math.prod(sizes.values()) == world_size, f"a mesh of {world_size} ranks cannot be {dict(sizes)}"
    return {axis: size for axis, size in sorted(sizes.items()) if size > 1 or axis == "data"}


def canonical(value: Any) -> bytes:
    """The one spelling of some plain data as JSON. Raises TypeError for what is not plain."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _signed(text: bytes) -> bytes:
    """A JSON object with its own hash as its last member."""
    return b'%s,"xxh3":"%s"}' % (text[:-1], xxhash.xxh3_128_hexdigest(text).encode())


_HASH_BYTES = len(_signed(b"{}")) - len(b"{")


def path(step: int, name: str) -> str:
    """A checkpoint's file, relative to the run's folder."""
    return f"{step_folder(step)}/{name}"


def read(run: RunDir, step: int, name: str | None = None, *, tensors: bool = True) -> Manifest:
    """The manifest of a step, the one that counts; `name`: its file, where that is known already. `tensors`: False leaves them out:
    of 10,000 ranks they take a second, the rest some hundredths of one.

    Raises CheckpointNotFound if that step is not committed, CheckpointCorrupt or CheckpointTooNew naming the file.
    """
    found, _, late = _read(run, step, name, tensors)
    return found if late is None else replace(found, eval_loss=late)


def read_with_text(run: RunDir, step: int, name: str | None = None) -> tuple[Manifest, str]:
    """`read`, and what `loads` makes it from: with 10,000 ranks it takes half a second to write it anew."""
    found, data, late = _read(run, step, name, tensors=True)
    if late is not None:
        found = replace(found, eval_loss=late)
        data = found.dumps()
    return found, data.decode()


def _read(run: RunDir, step: int, name: str | None, tensors: bool) -> tuple[Manifest, bytes, float | None]:
    """The manifest, its bytes, and the eval loss that became known after it."""
    name = name or run.manifest(step)
    try:
        if name is None:
            raise FileNotFoundError
        data = run.storage.read(path(step, name))
    except FileNotFoundError:
        raise no_checkpoint(run, step, run.committed()) from None
    try:
        found = Manifest.loads(data, tensors=tensors)
        if found.step != step:
            raise ValueError(f"belongs to step {found.step}")
        if found.attempt != manifest_attempt(name):
            raise ValueError(f"belongs to attempt {found.attempt}")
    except CheckpointTooNew as error:
        raise CheckpointTooNew(f"{run.uri}/{path(step, name)}: {error.message}", error.hint) from None
    except ValueError as error:
        raise CheckpointCorrupt(f"{run.uri}/{path(step, name)}: {error}", _MENDING) from error
    return found, data, None if found.eval_loss is not None else _late_eval(run.storage, step)


def no_checkpoint(run: RunDir, step: int, committed: Sequence[int]) -> CheckpointNotFound:
    """The error for a step that is not committed."""
    last = ", ".join(map(str, committed[-SHOWN:])) or "none"
    more = f", and {len(committed) - SHOWN} before" if len(committed) > SHOWN else ""
    return CheckpointNotFound(f"{run.uri}: no checkpoint of step {step}", f"committed steps: {last}{more}")


_MENDING = (
    "`raydist checkpoint verify` lists every bad file; a resumed run continues from the checkpoint before this one"
)


def _late_eval(storage: Storage, step: int) -> float | None:
    try:
        body = parse_json(storage.read(path(step, EVAL)))
        return float(body["eval_loss"]) if body["step"] == step else None
    except (*DAMAGED, FileNotFoundError):
        # It is written atomically and is not part of the state: the checkpoint is good without it.
        return None


def write_eval(run: RunDir, step: int, loss: float) -> None:
    """Notes the eval loss of a committed checkpoint."""
    run.storage.write(path(step, EVAL), canonical({"step": step, "eval_loss": loss}))


def read_newest(run: RunDir) -> Manifest | None:
    """The newest manifest that can be read, without a look at its shards; None if there is none."""
    for step, name in reversed(run.manifests().items()):
        try:
            return read(run, step, name)
        except (CheckpointCorrupt, CheckpointNotFound):
            continue  # corrupt, or pruned since it was listed
    return None


class Unread(str):
    """The problem of a file that storage has not read. `whole`: it may be whole, see `lost`."""

    whole = True


def lost(error: OSError) -> bool:
    """Whether a disk cannot read the bytes (EIO): they are lost. After any other error they may be there."""
    of = error.__cause__ if isinstance(error, StorageError) else error
    return isinstance(of, OSError) and of.errno == errno.EIO


def check_file(run: RunDir, step: int, name: str, entry: FileEntry) -> str | None:
    """The problem of one shard, or None. Reads all of it; a shard that storage cannot read has a problem too, Unread."""
    where = f"{run.uri}/{path(step, name)}"
    try:
        with run.storage.open(path(step, name)) as source:
            size = source.size()
            if size != entry.bytes:
                return f"{where}: {size} bytes instead of {entry.bytes}"
            hasher = xxhash.xxh3_128()
            while block := source.read_buffer(READ_BYTES):
                hasher.update(block)
    except FileNotFoundError:
        return f"{where}: is missing"
    except OSError as error:
        problem = Unread(f"{where}: cannot be read: {error}")
        problem.whole = not lost(error)
        return problem
    if hasher.hexdigest() != entry.xxh3:
        return f"{where}: its bytes are not those that were written (xxh3 {hasher.hexdigest()} instead of {entry.xxh3})"
    return None


def verify(run: RunDir, step: int) -> list[str]:
    """Reads every byte of a checkpoint: its problems, each naming the bad file; [] if every byte is as it was written.

    Raises CheckpointNotFound if that step is not committed.
    """
    try:
        found = read(run, step)
    except CheckpointCorrupt as error:
        return [error.message]
    problems = [check_file(run, step, name, entry) for name, entry in sorted(found.files.items())]
    return [p for p in problems if p]


def best(run: RunDir, known: Known | None = None) -> int | None:
    """The committed step with the lowest eval loss, the newest of equals; None if none was evaluated. `known`: see `summary`."""
    return best_of(summary(run, known))


def best_of(rows: list[dict[str, Any]]) -> int | None:
    """`best` of the rows of `summary`."""
    losses = [
        (r["eval_loss"], -r["step"]) for r in rows if r["eval_loss"] is not None and math.isfinite(r["eval_loss"])
    ]
    return -min(losses)[1] if losses else None


_FACTS = ("eval_loss", "world_size", "attempt", "saved_at")
Known = MutableMapping[str, dict[str, Any]]
"""The file of a manifest -> what `summary` needs of it. A manifest never changes."""


def facts(found: Manifest) -> dict[str, Any]:
    """What `Known` has of a manifest."""
    return {"bytes": found.nbytes, **{name: getattr(found, name) for name in _FACTS}}


def summary(run: RunDir, known: Known | None = None) -> list[dict[str, Any]]:
    """A run's committed checkpoints, oldest first: step, bytes, best, eval_loss, world_size, attempt, saved_at, problem.

    `problem`: why its manifest cannot be read (the other fields are then None), or None. Shards are not read, nor manifests that
    are `known`, which has those of this run afterwards.
    """
    rows: list[dict[str, Any]] = []
    before: Known = {} if known is None else {**known}
    now: Known = {} if known is None else known
    now.clear()
    for step, name in run.manifests().items():
        row = {"step": step, "bytes": None, "best": False, **dict.fromkeys(_FACTS), "problem": None}
        has = before.get(path(step, name))
        try:
            if has is None:
                has = facts(read(run, step, name, tensors=False))
            elif has["eval_loss"] is None:
                has = {**has, "eval_loss": _late_eval(run.storage, step)}
        except CheckpointNotFound:
            continue  # pruned since it was listed
        except CheckpointCorrupt as error:
            rows.append({**row, "problem": error.message})
            continue
        now[path(step, name)] = has
        rows.append({**row, **has})
    winner = best_of(rows)
    for row in rows:
        row["best"] = row["step"] == winner
    return rows


def changed_numbers(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each field that differs, "field: old, now new"; empty if the two compute the same numbers."""
    old, new = json.loads(canonical(dict(old))), json.loads(canonical(dict(new)))
    absent = "nothing"
    return [
        f"{name}: was {_show(old.get(name, absent))}, is {_show(new.get(name, absent))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, absent) != new.get(name, absent)
    ]


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
