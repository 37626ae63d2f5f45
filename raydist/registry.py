"""A name -> the extension of that name: a file in a folder of raydist, or your own `package.module:attribute`.

Runs anywhere. Names are found by listing the folders, and what the driver needs to know of an extension (its options, its plan) is
read from its file without importing it. So the driver validates a job without torch. docs/extending.md has the kinds.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raydist import pysource
from raydist.errors import ExtensionNotFound

_ROOT = Path(__file__).parent

FOLDERS = {
    "model": ("worker/model", "build"),
    "parallel": ("worker/parallel", "Strategy"),
    "optimizer": ("worker/optim/optimizers", "build"),
    "loss": ("worker/loss", "build"),
    "exchange": ("worker/exchange", "build"),
    "compressor": ("worker/comm/compressors", "Compressor"),
    "tokenizer": ("data/tokenizers", "Tokenizer"),
    "scheduler": ("cluster/sweep/schedulers", "build"),
    "exporter": ("observe/exporters", "Exporter"),
    "hook": ("worker/hooks", "Hook"),
    "diagnosis": ("diagnosis", "check"),
}
"""Kind of extension -> (its folder under raydist/, the attribute that a file of it must have)."""

_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

_SHARDED = (
    "fully sharded is zero3 here, or hsdp, which keeps a copy in each group of ranks (docs/explanation/sharding.md)"
)
_STAGES = "DeepSpeed's stages are zero1, zero2 and zero3 here; --deepspeed FILE takes its whole configuration"
_ALONE = "one worker trains the model as it is: leave parallel out, and set cluster.workers: 1"
ELSEWHERE = {
    "parallel": {
        **dict.fromkeys(("fsdp", "fsdp1", "fsdp2", "fully_shard", "full_shard"), _SHARDED),
        "hybrid_shard": _SHARDED,
        **dict.fromkeys(("deepspeed", "zero", "zero-1", "zero-2", "zero-3"), _STAGES),
        **dict.fromkeys(("none", "single", "no", "null"), _ALONE),
        **dict.fromkeys(("dp", "data_parallel"), 'copies on all ranks are "ddp"'),
    }
}
"""Kind of extension -> name in other programs -> the remedy for a user who writes that name."""


def names(kind: str) -> list[str]:
    """The names of the built-in extensions of a kind, sorted. Lists the folder; imports nothing."""
    folder, _ = FOLDERS[kind]
    return sorted(p.stem for p in (_ROOT / folder).glob("*.py") if not p.stem.startswith("_"))


def did_you_mean(value: str, known: list[str]) -> str:
    """`did you mean "x"?` where a known name is near, else the list of known names: the second part of an error."""
    if not known:
        return "none is built in"
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known)}"


_trusted = True


def trust(specs: bool) -> None:
    """Whether this process may run the own code that a spec names, as `package.module:attribute`. A command that only reads a run
    may not: the run may be another user's. It then takes such names as they are, and `load` refuses them.
    """
    global _trusted
    _trusted = specs


def own_code_last(*others: str) -> None:
    """From now on this process looks for modules in the working directory, where a user's own code is, after all other places: a
    file there does not replace a module of Python's or an installed package. So with those of `others` where it looks now.
    """
    here = os.getcwd()
    paths = [path for path in sys.path if path and os.path.abspath(path) != here]
    last = [path for path in others if path in paths]
    sys.path[:] = [*(path for path in paths if path not in last), *last, here]


def check(kind: str, name: str) -> None:
    """Raises ExtensionNotFound if there is no extension `name` of that kind. Imports only the packages above an own module."""
    if ":" in name:
        if _trusted:
            check_attribute(kind, name)
    elif name not in names(kind):
        if hint := ELSEWHERE.get(kind, {}).get(name.lower()):
            raise ExtensionNotFound(f'unknown {kind} "{name}"', hint)
        near = did_you_mean(name, names(kind))
        own = f"one of your own is package.module:{FOLDERS[kind][1]}"
        raise ExtensionNotFound(f'unknown {kind} "{name}"', f"{near}{'' if near.endswith('?') else ';'} {own}")


def check_attribute(kind: str, name: str) -> None:
    """Raises ExtensionNotFound if the module cannot be found, or if its source shows that it lacks the attribute."""
    module, _, attribute = name.partition(":")
    try:
        found = bool(attribute) and find_spec(module) is not None
        missing = pysource.lacks(module, attribute) if found else None
    except (ImportError, ValueError):
        found, missing = False, None
    if not found:
        raise ExtensionNotFound(
            f'{kind} "{name}": no module "{module}" can be imported',
            "write package.module:attribute, and run from the folder that holds the package",
        )
    if missing is not None:
        raise ExtensionNotFound(f'{kind} "{name}": {missing}', "check the name after the colon")


def is_own(name: str) -> bool:
    """Whether the name has the form of a user's own extension, `package.module:attribute`."""
    return _OWN.fullmatch(name) is not None


def described(kind: str, name: str, what: str) -> Any:
    """The value of the module-level name `what` in an extension's file, or None where the file or the extension does not exist.

    The file is not imported: only the statements that `what` needs are run (`pysource.pick`). They must not need torch. Raises
    ExtensionNotFound where they fail.
    """
    if ":" not in name:
        return _built_in(kind, name, what)
    return _described(kind, name, what) if _trusted else None


@cache
def _built_in(kind: str, name: str, what: str) -> Any:
    """`described` of a built-in, whose file does not change: a search of meshes asks thousands of times."""
    return _described(kind, name, what)


def _described(kind: str, name: str, what: str) -> Any:
    module = name.partition(":")[0] if ":" in name else _module(kind, name)
    try:
        path = _file(kind, name)
        return None if path is None else pysource.pick(module, path, what)
    except Exception as error:
        raise ExtensionNotFound(
            f'{kind} "{name}": {what} of {module} cannot be read: {type(error).__name__}: {error}',
            f"{what} is read without importing the module: it may use only what its own file defines or imports at the top level",
        ) from error


def _file(kind: str, name: str) -> Path | None:
    """The source file of an extension; None where there is none."""
    if ":" not in name:
        path = _ROOT / FOLDERS[kind][0] / f"{name}.py"
        return path if path.is_file() and not name.startswith("_") else None
    try:
        found = find_spec(name.partition(":")[0])
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found is not None and found.origin and found.origin.endswith(".py") else None


def _module(kind: str, name: str) -> str:
    return f"raydist.{FOLDERS[kind][0].replace('/', '.')}.{name}"


def load(kind: str, name: str) -> Any:
    """Imports the extension: the attribute of a built-in's file, or of the user's module.

    Raises ExtensionNotFound, and whatever the module raises while it is imported.
    """
    if ":" in name and not _trusted:
        raise ExtensionNotFound(
            f'{kind} "{name}" is code that the files of a run or dataset name, and this command runs none of it',
            "if you trust their author, repeat the command with --trust (in Python: trust=True), in the folder that holds "
            "that code",
        )
    check(kind, name)
    attribute = FOLDERS[kind][1]
    module = _module(kind, name)
    if ":" in name:
        module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ExtensionNotFound(
            f'{kind} "{name}": {module} has no "{attribute}"', "check the name after the colon"
        ) from None
