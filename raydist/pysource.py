"""What a Python file defines, read without importing it.

`parse`: a syntax tree, also in several threads at once. `lacks`: whether `module:attribute` can exist; nothing is run. `pick`: the
value of one name of a file; only the statements that the name needs are run. So the driver reads the options of a strategy without
torch.

Runs anywhere. Imports nothing of raydist.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_DYNAMIC = frozenset({"globals", "vars", "locals", "exec", "eval", "setattr", "__dict__", "modules", "__import__"})
"""If a module uses one of these names, it may have attributes that do not appear in its text."""

_PARSING = threading.RLock()


def parse(text: bytes, file: str) -> ast.Module:
    """The syntax tree of a file's text; as `ast.parse`, but fit for several threads.

    Python 3.11 counts the recursion of all threads in one variable (python/cpython issue 106905): where a garbage collection runs
    a finalizer within `ast.parse`, another thread's parse fails with "AST constructor recursion depth mismatch".
    """
    with _PARSING:
        return ast.parse(text, file)


def lacks(module: str, attribute: str) -> str | None:
    """Why `module` cannot have this attribute; None if it has it, or if only an import can tell.

    Imports parent packages, like `find_spec`, but not the module. Raises ImportError and ValueError, like `find_spec`.
    """
    spec = find_spec(module)
    if spec is None or not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
        return None
    try:
        tree = parse(Path(spec.origin).read_bytes(), spec.origin)
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


def pick(module: str, path: Path, name: str) -> Any:
    """The value of the module-level `name` of the file at `path`, or None where no statement of the file binds it.

    Runs the statements that bind `name`, and those that bind what they use, in the file's order; no others. Of an import only the
    names that are used are imported. Annotations of functions do not count as used. `module`: the file's own dotted name. Raises
    what the statements raise, and SyntaxError and OSError.
    """
    return _pick(module, str(path), path.stat().st_mtime_ns, name)


@lru_cache(maxsize=256)
def _parsed(path: str, mtime_ns: int) -> tuple[tuple[ast.stmt, frozenset[str]], ...]:
    """Each statement of the file, with the names that it binds."""
    found = []
    for statement in parse(Path(path).read_bytes(), path).body:
        names = _Names()
        names.visit(statement)
        found.append((statement, frozenset(names.found)))
    return tuple(found)


@lru_cache(maxsize=256)
def _pick(module: str, path: str, mtime_ns: int, name: str) -> Any:
    statements = _parsed(path, mtime_ns)
    wanted, seen, chosen = [name], {name}, set()
    while wanted:
        used = wanted.pop()
        for i, (statement, bound) in enumerate(statements):
            if used in bound and i not in chosen:
                if not isinstance(statement, ast.Import | ast.ImportFrom):
                    more = set(_used(statement)) - seen
                    seen |= more
                    wanted += more
                chosen.add(i)
    if not chosen:
        return None
    body = [_import_of(s, seen) for i, (s, _) in enumerate(statements) if i in chosen or _is_future(s)]
    made = ModuleType(f"{module} ({name})")
    made.__file__ = path
    # pydantic looks up the names of annotations in the module of the class.
    sys.modules[made.__name__] = made
    exec(compile(ast.Module(body, []), path, "exec"), made.__dict__)
    return made.__dict__.get(name)


def _used(node: ast.AST) -> Iterator[str]:
    """The names that a statement uses, at once or when its functions are called."""
    match node:
        case ast.Name(id=name):
            yield name
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            below = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
            for child in below:
                yield from _used(child)
            return
    for child in ast.iter_child_nodes(node):
        yield from _used(child)


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _import_of(statement: ast.stmt, used: set[str]) -> ast.stmt:
    """An import, less the names that are not used; any other statement as it is."""
    if not isinstance(statement, ast.Import | ast.ImportFrom) or _is_future(statement):
        return statement
    names = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) in used or a.name == "*"]
    if isinstance(statement, ast.Import):
        return ast.copy_location(ast.Import(names), statement)
    return ast.copy_location(ast.ImportFrom(statement.module, names, statement.level), statement)


class _Names(ast.NodeVisitor):
    """The names that a module's own statements bind; names inside functions and classes do not count."""

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
        """Of a function's or class's body: `global`, and calls that can add names to the module."""
        for below in ast.walk(node):
            if isinstance(below, ast.Global):
                self.found |= set(below.names)
            elif isinstance(below, ast.Name):
                self.unsure |= below.id in {"globals", "exec", "setattr"}
            elif isinstance(below, ast.Attribute):
                self.unsure |= below.attr == "modules"
