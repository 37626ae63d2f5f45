"""Parses YAML, JSON, JSON lines and TOML within limits of size, depth, digits and expansion: every file may be untrusted.

Runs anywhere. Imports nothing of raydist. What is beyond a limit raises ValueError with that limit, before memory or time is spent
on it. Malformed text raises the parser's own error, which for JSON and TOML is a ValueError too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

JOB_BYTES = 1 << 20
"""Of a YAML file (1 MiB) and, expanded, of four times as much text."""
JSON_BYTES = 256 << 20
"""Of a JSON file: a manifest with a million chunks has 100 MB."""
LINE_BYTES = 16 << 20
TOML_BYTES = 1 << 16
DEPTH = 100
"""Levels of lists and mappings in one another."""
DIGITS = 100
"""Of an integer: less than the largest float."""
NAME = 200
"""Characters of a name."""
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, AssertionError)
"""What parsing a damaged file, and reading its fields, may raise."""
_EXPANDED = 4 * JOB_BYTES
_LONG = re.compile(rb"\d{%d}" % (DIGITS + 1)), re.compile(rf"\d{{{DIGITS + 1}}}")
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def size(number: int) -> str:
    """Bytes for a message: 1 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number} bytes"


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """A regular file of at most `most` bytes; never waits, as for a FIFO. Raises OSError, and ValueError for any other file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        facts = os.fstat(file.fileno())
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("is not a regular file")
        data = file.read(most + 1) if facts.st_size <= most else None
    if data is None or len(data) > most:
        raise ValueError(f"has more than {size(most)}, the limit")
    return data


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """`read_file` as text in UTF-8. Raises the same."""
    return read_file(path, most).decode("utf-8")


def parse_json(
    data: bytes | str, most: int = JSON_BYTES, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """JSON. `pairs`: json's object_pairs_hook. Raises ValueError."""
    if len(data) > most:
        raise ValueError(f"it has more than {size(most)}, the limit")
    long = _LONG[0].search(data) if isinstance(data, bytes) else _LONG[1].search(data)
    try:
        found = json.loads(data, parse_int=_integer if long else None, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_DEEP) from None
    if (data.count(b"[") + data.count(b"{") if isinstance(data, bytes) else data.count("[") + data.count("{")) > DEPTH:
        check_depth(found)
    return found


_DEEP = f"nested too deeply: more than {DEPTH} levels, the limit"


def check_depth(value: Any) -> None:
    """Raises ValueError if lists and dicts are nested too deeply in plain data."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEPTH + 1:
            raise ValueError(_DEEP)
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, (dict, list))
        ]


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text)} digits: the limit is {DIGITS}")
    return int(text)


class _Loader(_Base):  # type: ignore[misc]
    """Plain YAML, with text as keys."""


class JobLoader(_Loader):
    """The same with floats as people write them: 1e-4 too."""


JobLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
JobLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d+(?:[eE][-+]?\d+)?)$"),
    list("-+.0123456789"),
)


_MERGE = "tag:yaml.org,2002:merge"


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    """A dict with what "<<" merges below its own keys. Not construct_mapping, which changes nodes that other aliases name.

    What is merged counts as an alias in `_check_yaml`, so it is within the limit of expansion.
    """
    made: dict[str, Any] = {}
    below: dict[str, Any] = {}
    for key_node, value_node in node.value:
        merges = key_node.tag == _MERGE
        key = "<<" if merges else loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            problem = f"the key {key!r:.40} is no text: put it in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in made or (merges and below):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r:.{NAME}} is given twice", key_node.start_mark
            )
        value = loader.construct_object(value_node, deep=True)
        if not merges:
            made[key] = value
            continue
        several = value if isinstance(value, list) else [value]
        if not all(isinstance(each, dict) for each in several):
            problem = "<<: takes a mapping, or a list of mappings"
            raise yaml.constructor.ConstructorError(None, None, problem, value_node.start_mark)
        for each in reversed(several):  # the first one wins
            below |= each
    return below | made


def _number(loader: Any, node: yaml.ScalarNode) -> int:
    if len(node.value) > DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"an integer of {len(node.value)} digits: the limit is {DIGITS}", node.start_mark
        )
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)


def parse_yaml(data: bytes | str, loader: Any = _Loader, most: int = JOB_BYTES) -> Any:
    """YAML. `loader`: JobLoader for what people write. Raises ValueError, or yaml.YAMLError for malformed text."""
    if len(data) > most:
        raise ValueError(f"it has more than {size(most)}, the limit")
    _check_yaml(data)
    return yaml.load(data, Loader=loader)


def _check_yaml(data: bytes | str) -> None:
    """Raises ValueError for a nesting or an expansion of aliases beyond the limits: an alias of aliases doubles with each line."""
    sizes: dict[str, int] = {}
    containers: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(data, Loader=_Base):
        if isinstance(event, yaml.CollectionStartEvent):
            containers.append((event.anchor, 1))
            if len(containers) > DEPTH + 1:
                raise ValueError(_DEEP)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, grown = containers.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, grown = event.anchor, 1 + len(event.value)
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == outer for outer, _ in containers):
                raise ValueError(f"the alias *{event.anchor:.{NAME}} stands in what it names")
            anchor, grown = None, sizes.get(event.anchor or "", 0)
        else:
            continue
        if anchor is not None:
            sizes[anchor] = grown
        outer, before = containers[-1]
        if before + grown > _EXPANDED:
            raise ValueError(f"its aliases expand to more than {size(_EXPANDED)}, the limit")
        containers[-1] = outer, before + grown


def parse_toml(data: bytes) -> dict[str, Any]:
    """TOML. Raises ValueError."""
    if len(data) > TOML_BYTES:
        raise ValueError(f"it has more than {size(TOML_BYTES)}, the limit")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(_DEEP) from None


def unzip(data: bytes, most: int = JSON_BYTES) -> bytes:
    """The content of a gzip file. Raises ValueError for one that is damaged, or larger than `most` unpacked."""
    made = zlib.decompressobj(wbits=31)
    try:
        found = made.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"is not gzip: {error}") from None
    if len(found) > most:
        raise ValueError(f"it has more than {size(most)} unpacked, the limit")
    if not made.eof:
        raise ValueError("is a truncated gzip file")
    return found


def quoted(path: str | Path) -> str:
    """A path for a message: at most NAME characters of it."""
    text = str(path)
    return text if len(text) <= NAME else f"{text[:NAME]}..."
