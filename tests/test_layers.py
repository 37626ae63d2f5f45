"""Imports point one way, and each package uses only its allowed libraries. Read with `ast`: nothing is imported."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "raydist"
LAYERS = [
    {"cli", "__main__"},
    {"api"},
    {"dashboard"},
    {"cluster"},
    {"report"},
    {"observe"},
    {"diagnosis"},
    {"bench"},
    {"planner", "deploy"},
    {"own"},
    {"launch"},
    {"worker"},
    {"ipc"},
    {"checkpoint"},
    {"data"},
    {"faults"},
    {"spec"},
    {"run"},
    {"registry", "extension_plans", "storage", "remote_filesystem", "conditional_writes"},
    {
        "records",
        "errors",
        "redact",
        "display",
        "sinks",
        "printable",
        "private_files",
        "parsing",
        "paths",
        "pysource",
        "cgroups",
        "__init__",
        "__version__",
    },
]
MODULES = sorted(ROOT.rglob("*.py"))


def part(name: str) -> str:
    """The package of a dotted module: raydist.worker.loop -> worker; raydist -> __init__."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def dotted(path: Path) -> str:
    """The module's name."""
    pieces = ["raydist", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)


def layer(room: str) -> int:
    """0 is the highest."""
    found = [i for i, rooms in enumerate(LAYERS) if room in rooms]
    assert found, f"raydist/{room} stands in no layer of tests/test_layers.py"
    return found[0]


@functools.cache
def tree(path: Path) -> ast.Module:
    """The file, parsed."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, top_only: bool = False) -> set[str]:
    """Modules that a file imports; `top_only`: only at import time, without those under TYPE_CHECKING."""
    found: set[str] = set()

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                if top or not top_only:
                    found.update(a.name for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                if top or not top_only:
                    found.update({f"{child.module}.{a.name}" for a in child.names} | {child.module or ""})
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            else:
                visit(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(tree(path), True)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """No module imports a package of a higher layer."""
    own = layer(part(dotted(path)))
    for name in imports(path):
        if name == "raydist" or name.startswith("raydist."):
            assert layer(part(name)) >= own, f"{dotted(path)} imports {name}, which is higher"


def test_no_circle() -> None:
    """Modules of one package do not import one another in a circle at import time."""
    known = {dotted(p) for p in MODULES}
    graph = {dotted(p): {n for n in imports(p, top_only=True) if n in known} - {dotted(p)} for p in MODULES}
    # `from raydist.spec import x` inside raydist.spec names the package itself, which is being imported already.
    for name, targets in graph.items():
        graph[name] = {t for t in targets if not name.startswith(t + ".")}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in graph[name]:
                walk(target, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_and_ray_keep_to_their_rooms(path: Path) -> None:
    """The driver and the monitors never import torch; the loop never imports ray; the rest imports neither."""
    room, name = part(dotted(path)), dotted(path)
    every, top = imports(path), imports(path, top_only=True)

    def has(found: set[str], package: str) -> bool:
        return any(n == package or n.startswith(package + ".") for n in found)

    if room in ("worker", "launch", "planner", "own"):
        assert name == "raydist.launch.agent" or not has(every, "ray"), f"{name} imports ray"
    elif room == "ipc":
        assert not has(top, "torch"), f"{name} imports torch before a rank calls it"
        assert not has(every, "ray"), f"{name} imports ray"
    elif room in ("cluster", "observe"):
        assert not has(every, "torch"), f"{name} imports torch"
    elif room == "bench":
        assert not has(every, "ray"), f"{name} imports ray"
    elif room == "cli":
        assert not has(top, "torch"), f"{name} imports torch before a command is called"
        assert not has(top, "ray"), f"{name} imports ray before a command is called"
    else:
        assert not has(every, "torch"), f"{name} imports torch"
        assert not has(every, "ray"), f"{name} imports ray"


def test_the_commands_are_thin() -> None:
    """What a command does is a function of raydist/api, so that Python has it, too: only raydist/cli imports typer, and of it only
    `bench`, a command alone, imports something of raydist/cluster."""
    for path in MODULES:
        name, found = dotted(path), imports(path)
        if part(name) != "cli":
            assert not any(each.partition(".")[0] in ("typer", "click") for each in found), f"{name} imports typer"
        elif path.stem != "bench":
            rooms = {part(each) for each in found if each.startswith("raydist.")}
            assert "cluster" not in rooms, f"{name} imports raydist.cluster"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    """Modules, public classes, and public functions and methods have docstrings."""
    missing = [] if ast.get_docstring(tree(path)) else ["the module"]

    def visit(node: ast.AST, protocol: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_"):
                continue
            if not ast.get_docstring(child) and not protocol:
                missing.append(child.name)
            if isinstance(child, ast.ClassDef):
                visit(child, any("Protocol" in ast.dump(b) for b in child.bases))

    visit(tree(path), False)
    assert not missing, f"{dotted(path)}: no docstring: {', '.join(missing)}"


def test_paths_of_users_are_expanded_in_one_place() -> None:
    """By raydist.paths.local_path: Path.expanduser raises RuntimeError for a user that does not exist, as in ~nobody/x."""
    assert [dotted(path) for path in MODULES if "expanduser" in path.read_text()] == ["raydist.paths"]
