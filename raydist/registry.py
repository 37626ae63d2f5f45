"""A name -> the extension of that name: a file in a folder of raydist, or anyone's `package.module:attribute`.

Runs anywhere. The folders are listed without importing them, so that the driver can check names without torch.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raydist.errors import ExtensionNotFound

_ROOT = Path(__file__).parent

FOLDERS = {
    "model": ("worker/model", "build"),
    "parallel": ("worker/parallel", "Strategy"),
    "diagnosis": ("diagnosis", "check"),
    "exporter": ("observe/exporters", "Exporter"),
}
"""Kind of extension -> (its folder under raydist/, the attribute that a file of it must have)."""


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
        module, _, attribute = name.partition(":")
        try:
            found = bool(attribute) and find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise ExtensionNotFound(
                f'{kind} "{name}": no module "{module}" can be imported',
                "write package.module:attribute, and run from the folder that holds the package",
            )
    elif name not in names(kind):
        raise ExtensionNotFound(f'unknown {kind} "{name}"', did_you_mean(name, names(kind)))


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
