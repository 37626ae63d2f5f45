"""What a Python file defines, read without running it: whether `module:attribute` can be there, before anything starts.

Runs anywhere. Imports nothing of raydist.
"""

from __future__ import annotations

import ast
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

_DYNAMIC = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr", "__dict__", "modules", "__import__"})
"""Names of which a module that uses one may have attributes that its text does not show."""


def lacks(module: str, attribute: str) -> str | None:
    """Why `module` surely has no such attribute; None where it has, or where only its import can tell.

    A package's parents are imported, as by `find_spec`, the module is not. Raises ImportError and ValueError as that does.
    """
    spec = find_spec(module)
    if spec is None or not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except SyntaxError as error:
        return f"{Path(spec.origin).name}, line {error.lineno}: {error.msg}"
    except (OSError, ValueError):
        return None
    names = _Names()
    names.visit(tree)
    if names.unsure or attribute in names.found:
        return None
    if spec.submodule_search_locations is not None and attribute.isidentifier() and find_spec(f"{module}.{attribute}"):
        return None
    return f'{module} has no "{attribute}"'


class _Names(ast.NodeVisitor):
    """The names that a module's own statements bind; what functions and classes have inside does not count."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.unsure = False

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.found.add(node.name)
                self.unsure |= node.name == "__getattr__"
                self._inside(node)
                return
            case ast.Lambda():
                return
            case ast.Import():
                self.found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom():
                self.found |= {alias.asname or alias.name for alias in node.names}
                self.unsure |= any(alias.name == "*" for alias in node.names)
            case ast.Name(id=name):
                self.unsure |= name in _DYNAMIC
                if isinstance(node.ctx, ast.Store):
                    self.found.add(name)
            case ast.Attribute(attr=name):
                self.unsure |= name in _DYNAMIC
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                self.found.add(name)
            case ast.MatchMapping(rest=str(name)):
                self.found.add(name)
        self.generic_visit(node)

    def _inside(self, node: ast.AST) -> None:
        """Of a function's or a class' body only what reaches the module: `global`, and what may do so unseen."""
        for below in ast.walk(node):
            if isinstance(below, ast.Global):
                self.found |= set(below.names)
            elif isinstance(below, ast.Name):
                self.unsure |= below.id in {"globals", "exec", "setattr"}
            elif isinstance(below, ast.Attribute):
                self.unsure |= below.attr == "modules"
