"""A name -> the extension of that name: a file in a folder of raydist, or anyone's `package.module:attribute`.

Runs anywhere. The folders are listed without importing them, so that the driver can check names without torch.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raydist import pysource
from raydist.errors import ExtensionNotFound

_ROOT = Path(__file__).parent

FOLDERS = {
    "model": ("worker/model", "build"),
    "parallel": ("worker/parallel", "Strategy"),
    "diagnosis": ("diagnosis", "check"),
    "exporter": ("observe/exporters", "Exporter"),
}
"""Kind of extension -> (its folder under raydist/, the attribute that a file of it must have)."""


_SHARDED = "fully sharded is zero3 here, or hsdp, which keeps a copy in each group of ranks (docs/sharding.md)"
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
"""Kind of extension -> what other programs call one -> what it is here."""


def names(kind: str) -> list[str]:
    """The built-in extensions of a kind, sorted; found by listing the folder."""
    folder, _ = FOLDERS[kind]
    return sorted(p.stem for p in (_ROOT / folder).glob("*.py") if not p.stem.startswith("_"))


def did_you_mean(value: str, known: list[str]) -> str:
    """` (did you mean "x"?)` for a near miss, else the names there are; ready to follow a message."""
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known)}"


def check(kind: str, name: str) -> None:
    """Raises ExtensionNotFound if `name` cannot be an extension of that kind. Imports nothing but parents' packages."""
    if ":" in name:
        check_attribute(kind, name)
    elif name not in names(kind):
        if hint := ELSEWHERE.get(kind, {}).get(name.lower()):
            raise ExtensionNotFound(f'unknown {kind} "{name}"', hint)
        near = did_you_mean(name, names(kind))
        own = f"one of your own is package.module:{FOLDERS[kind][1]}"
        raise ExtensionNotFound(f'unknown {kind} "{name}"', f"{near}{'' if near.endswith('?') else ';'} {own}")


def check_attribute(kind: str, name: str) -> None:
    """Raises ExtensionNotFound if there is no "package.module:attribute" of that name, as far as the module's text says."""
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


def load(kind: str, name: str) -> Any:
    """The extension itself: the attribute of a built-in's file, or of the user's module.

    Raises ExtensionNotFound; what the module raises while it is imported passes through.
    """
    check(kind, name)
    folder, attribute = FOLDERS[kind]
    module = f"raydist.{folder.replace('/', '.')}.{name}"
    if ":" in name:
        module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ExtensionNotFound(
            f'{kind} "{name}": {module} has no "{attribute}"', "check the name after the colon"
        ) from None
