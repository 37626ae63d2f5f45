"""raydist.parsing: limits of size, depth, digits and expansion, each named in the error; what is within them is parsed."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist import parsing
from raydist.parsing import (
    DEPTH,
    DIGITS,
    JOB_BYTES,
    TOML_BYTES,
    JobLoader,
    check_depth,
    parse_json,
    parse_toml,
    parse_yaml,
    read_file,
    unzip,
)


def lists(levels: int) -> Any:
    """Lists in one another."""
    made: Any = []
    for _ in range(levels - 1):
        made = [made]
    return made


def aliases(lines: int) -> str:
    """YAML that doubles with each line."""
    return "a0: &a0 [xxxx]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, lines))


BEYOND: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "yaml size": (parse_yaml, "#" * (JOB_BYTES + 1), "more than 1 MiB, the limit"),
    "yaml depth": (parse_yaml, "[" * (DEPTH + 1) + "]" * (DEPTH + 1), f"more than {DEPTH} levels, the limit"),
    "yaml mappings": (
        parse_yaml,
        "{a: " * (DEPTH + 1) + "1" + "}" * (DEPTH + 1),
        f"more than {DEPTH} levels, the limit",
    ),
    "yaml unclosed": (parse_yaml, "[" * 100_000, f"more than {DEPTH} levels, the limit"),
    "yaml aliases": (parse_yaml, aliases(60), "expand to more than 4 MiB, the limit"),
    "yaml merged aliases": (parse_yaml, aliases(60) + "b: {<<: {c: *a59}}\n", "expand to more than 4 MiB, the limit"),
    "yaml merges": (
        parse_yaml,
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60)),
        "expand to more than 4 MiB, the limit",
    ),
    "yaml merge of itself": (parse_yaml, "a: &a {<<: *a}\n", "the alias *a stands in what it names"),
    "yaml merge of text": (parse_yaml, "<<: x\n", "<<: takes a mapping, or a list of mappings"),
    "yaml merge of texts": (parse_yaml, "<<: [{a: 1}, x]\n", "<<: takes a mapping, or a list of mappings"),
    "yaml merge twice": (parse_yaml, "<<: {a: 1}\n<<: {b: 1}\n", "the key '<<' is given twice"),
    "yaml key twice beside a merge": (parse_yaml, "<<: {a: 1}\na: 2\na: 3\n", "the key 'a' is given twice"),
    "yaml in itself": (parse_yaml, "a: &a [*a]\n", "the alias *a stands in what it names"),
    "yaml list as a key": (parse_yaml, "? [1]\n: 2\n", "is no text: put it in quotes"),
    "yaml number as a key": (parse_yaml, "1: 2\n", "is no text: put it in quotes"),
    "yaml mapping as a key": (parse_yaml, "? {a: 1}\n: 2\n", "is no text: put it in quotes"),
    "yaml key twice": (parse_yaml, "a: 1\na: 2\n", "is given twice"),
    "yaml digits": (parse_yaml, f"a: {'9' * 5000}", f"an integer of 5000 digits: the limit is {DIGITS}"),
    "yaml code": (parse_yaml, "!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "json size": (lambda data: parse_json(data, 100), b"[" + b" " * 100 + b"]", "more than 100 bytes, the limit"),
    "json depth": (parse_json, b"[" * (DEPTH + 2) + b"]" * (DEPTH + 2), f"more than {DEPTH} levels, the limit"),
    "json unclosed": (parse_json, b"[" * 100_000, f"more than {DEPTH} levels, the limit"),
    "json objects": (parse_json, '{"a": ' * 900 + "1" + "}" * 900, f"more than {DEPTH} levels, the limit"),
    "json digits": (parse_json, b"9" * 5000, f"an integer of 5000 digits: the limit is {DIGITS}"),
    "json digits in text": (parse_json, '{"a": ' + "9" * (DIGITS + 1) + "}", f"an integer of {DIGITS + 1} digits"),
    "json without end": (parse_json, b'{"a": "' + b"x" * 1000, "Unterminated string"),
    "toml size": (parse_toml, b"#" * (TOML_BYTES + 1), "more than 64 KiB, the limit"),
    "toml depth": (parse_toml, b"a = " + b"[" * 5000, "nested too deeply"),
    "gzip size": (
        lambda data: unzip(data, 1000),
        gzip.compress(bytes(10**6)),
        "more than 1000 bytes unpacked, the limit",
    ),
    "gzip cut": (unzip, gzip.compress(os.urandom(1000))[:500], "truncated"),
    "gzip none": (unzip, b"plain", "is not gzip"),
    "plain depth": (check_depth, lists(DEPTH + 2), f"more than {DEPTH} levels, the limit"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_a_limit_is_refused(name: str) -> None:
    """ValueError, or the parser's own error, which says what the limit is."""
    parse, data, says = BEYOND[name]
    with pytest.raises((ValueError, yaml.YAMLError), match=says.replace("*", "[*]")):
        parse(data)


WITHIN: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "yaml depth": (parse_yaml, "[" * DEPTH + "]" * DEPTH, lists(DEPTH)),
    "yaml alias": (parse_yaml, "a: &a [1]\nb: *a\nc: *a\n", {"a": [1], "b": [1], "c": [1]}),
    "yaml merge": (
        parse_yaml,
        "a: &a {x: 1, y: {z: 2}}\nb: {y: 3, <<: *a}\nc: {<<: [{x: 5}, *a]}\n",
        {"a": {"x": 1, "y": {"z": 2}}, "b": {"x": 1, "y": 3}, "c": {"x": 5, "y": {"z": 2}}},
    ),
    "yaml merge of a merge": (
        parse_yaml,
        "a: {<<: &b {x: 1, <<: {x: 2, y: 3}}}\nb: *b\n",
        {"a": {"x": 1, "y": 3}, "b": {"x": 1, "y": 3}},
    ),
    "yaml quoted merge": (parse_yaml, '"<<": 1', {"<<": 1}),
    "yaml digits": (parse_yaml, "9" * DIGITS, int("9" * DIGITS)),
    "yaml floats of people": (lambda data: parse_yaml(data, JobLoader), "[1e-4, 1.5, 0x10, 7]", [1e-4, 1.5, 16, 7]),
    "json depth": (parse_json, b"[" * DEPTH + b"]" * DEPTH, lists(DEPTH)),
    "json digits": (parse_json, b"9" * DIGITS, int("9" * DIGITS)),
    "json digits in a string": (parse_json, json.dumps("9" * 5000), "9" * 5000),
    "json wide": (parse_json, json.dumps([[1]] * 1000), [[1]] * 1000),
    "toml": (parse_toml, b"a = 1", {"a": 1}),
    "gzip": (unzip, gzip.compress(b"text"), b"text"),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_is_within_the_limits_is_parsed(name: str) -> None:
    """The values, also those at the limit."""
    parse, data, expected = WITHIN[name]
    assert parse(data) == expected


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A FIFO without a writer, a device without an end, a folder and a file that is too large are refused, without waiting."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(bytes(101))
    for path, error, says in (
        (tmp_path / "fifo", ValueError, "is not a regular file"),
        (Path("/dev/zero"), ValueError, "is not a regular file"),
        (tmp_path, IsADirectoryError, "Is a directory"),
        (tmp_path / "large", ValueError, "has more than 100 bytes, the limit"),
        (Path("/proc/self/environ"), ValueError, "has more than 0 bytes, the limit"),  # its size is 0 until it is read
    ):
        with pytest.raises(error, match=says):
            read_file(path, 0 if "proc" in path.parts else 100)
    assert parsing.size(1536) == "1.5 KiB"
