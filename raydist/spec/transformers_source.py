"""What the source of the library `transformers` says of its causal models, read without importing it: that would import torch.

Runs anywhere. Without torch.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raydist import pysource

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_WHETHER = "use_sliding_window"


def models() -> dict[str, str] | None:
    """`model_type` in config.json -> the class; None without the library."""
    found = _picked("modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return None if found is None else dict(found)


def cannot_pack(takes: Collection[str], setting: Callable[[str], Any]) -> str:
    """Why a model cannot keep packed documents apart, as far as the arguments of its `forward` and its config tell; else ""."""
    if missing := [name for name in ("attention_mask", "position_ids") if name not in takes]:
        return f"it takes no {' and no '.join(missing)}"
    for key in _WINDOWS:
        if isinstance(size := setting(key), int) and size > 0 and setting(_WHETHER) in (None, True):
            return f"its config has {key}, which a mask of documents replaces"
    return ""


def known_not_to_pack(config: Mapping[str, Any]) -> str:
    """`cannot_pack` of a config.json, with the defaults of its class; "" also where the source does not tell."""
    kind, known = config.get("model_type"), models()
    if known is None or kind not in known:
        return ""
    module = (_picked("auto_mappings", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME") or {}).get(kind, kind.replace("-", "_"))
    forward = next((_arguments(c) for c in _classes(f"{module}/modeling_{module}.py") if c.name == known[kind]), None)
    if forward is None:  # inherited, or in another file
        return ""
    inner = config.get("text_config")
    given = inner if isinstance(inner, Mapping) else config
    defaults: dict[str, Any] = {}
    for each in map(_values, _classes(f"{module}/configuration_{module}.py")):
        if each.get("model_type") == given.get("model_type", kind):
            defaults = each
    return cannot_pack(forward, lambda key: given.get(key, defaults.get(key)))


def _models_folder() -> Path | None:
    package = find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0]) / "models"


def _picked(module: str, name: str) -> Any:
    """A table of the folder models/auto; None if there is no such file."""
    folder = _models_folder()
    path = folder / f"auto/{module}.py" if folder else None
    return pysource.pick(f"transformers.models.auto.{module}", path, name) if path and path.exists() else None


def _classes(file: str) -> list[ast.ClassDef]:
    folder = _models_folder()
    if folder is None or not (folder / file).exists():
        return []
    return [node for node in pysource.parse((folder / file).read_bytes(), file).body if isinstance(node, ast.ClassDef)]


def _arguments(of: ast.ClassDef) -> set[str] | None:
    """Of the class's own `forward`."""
    for node in of.body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return None


def _values(of: ast.ClassDef) -> dict[str, Any]:
    """The constants that a class's body assigns."""
    made = {}
    for node in of.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                made[target.id] = value.value
    return made
