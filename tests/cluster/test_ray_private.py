"""Ray's private names are all in one module, and all exist in the installed Ray."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from packaging.requirements import Requirement

from raydist.cluster import nodes, ray_private
from raydist.cluster.ray_private import NAMES, PrivateName

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "raydist"
ADAPTER = ROOT / "cluster/ray_private.py"
MODULES = sorted(ROOT.rglob("*.py"))
PUBLIC = {
    "ray",
    "ray.cloudpickle",
    "ray.data",
    "ray.exceptions",
    "ray.job_submission",
    "ray.train",
    "ray.train.backend",
    "ray.tune",
    "ray.tune.experiment",
    "ray.tune.schedulers",
    "ray.tune.search",
    "ray.util",
    "ray.util.metrics",
    "ray.util.placement_group",
    "ray.util.scheduling_strategies",
}
"""Modules that Ray's API reference names. raydist imports these anywhere; all others in ray_private.py."""
SUBCLASSES = ("raydist.cluster.local_ray", "raydist.cluster.run.ray_train_adapter")
"""Modules with classes that derive from private classes of Ray."""


def is_private(name: str) -> bool:
    """Whether a dotted name of Ray has a part that begins with an underscore, or is not in a public module."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def used(path: Path) -> set[str]:
    """Private names of Ray that a file imports, accesses as `ray.x.y`, or has as a string for importlib."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "ray" and a.name not in PUBLIC}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name not in PUBLIC and (node.module not in PUBLIC or is_private(alias.name)):
                    found.add(name)
        elif isinstance(node, ast.Attribute) and re.match(r"ray(\.\w+)*\._[a-z]", text := ast.unparse(node)):
            found.add(text)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"ray(\.\w+)*\._\w+[\w.:]*", str(node.value)):
            found.add(str(node.value))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_names_are_in_one_module(path: Path) -> None:
    """No other file of raydist uses a private module of Ray, or a name of Ray with an underscore."""
    if path != ADAPTER:
        assert not used(path), f"{path.relative_to(REPOSITORY)}: import it from raydist.cluster.ray_private"


def test_a_private_name_is_found_in_every_form(tmp_path: Path) -> None:
    """Imports, attributes and strings are found; public names are not."""
    path = tmp_path / "module.py"
    path.write_text(
        "from ray import train\nimport ray.data\nimport ray.train.v2.api\n"
        "from ray.util import _x\nfrom ray._private.node import Node\n"
        "x = ray._raylet.KEY\ny = ray.get(1)\nz = import_module('ray._private.state')\n"
    )
    assert used(path) == {
        "ray.train.v2.api",
        "ray.util._x",
        "ray._private.node.Node",
        "ray._raylet.KEY",
        "ray._raylet",
        "ray._private.state",
    }


@pytest.mark.parametrize("name", NAMES)
def test_ray_has_the_name(name: str) -> None:
    """The name and its members that raydist uses exist. If not: find what moved in Ray, and change ray_private.py and its
    users."""
    known, found = NAMES[name], ray_private.resolve(name)
    path = known.path.replace(":", ".")
    missing = [member for member in known.members if not has(found, member)]
    assert not missing, f"Ray {ray.__version__}: {path} has no {', '.join(missing)}: used for: {known.used_for}"


def has(found: Any, member: str) -> bool:
    """Whether a class, object or module has that attribute, or a method of the class sets it."""
    classes = found.__mro__ if isinstance(found, type) else ()
    return hasattr(found, member) or any(
        f"self.{member}" in inspect.getsource(cls) for cls in classes if cls.__module__.startswith("ray.")
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_used(name: str) -> None:
    """Some file imports it from ray_private."""
    importing = (
        node
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "raydist.cluster.ray_private"
    )
    assert any(alias.name == name for node in importing for alias in node.names), f"nobody uses {name}: remove it"


@pytest.mark.parametrize("module", SUBCLASSES)
def test_overridden_methods_are_listed(module: str) -> None:
    """Methods that raydist's classes override in Ray's, and attributes that they read as `self._x`, are in `members`: Ray may
    rename them."""
    imported = importlib.import_module(module)
    listed = {ray_private.resolve(name): known.members for name, known in NAMES.items()}
    derived = [cls for cls in vars(imported).values() if isinstance(cls, type) and cls.__module__ == module]
    checked = 0
    for cls in derived:
        bases = [base for base in cls.__mro__ if base in listed]
        if not bases:
            continue
        checked += 1
        members = {member for base in bases for member in listed[base]}
        ours = [own for own in cls.__mro__ if own.__module__ == module]
        known = {name for own in ours for name in (*vars(own), *attributes(own, ast.Store))}
        overridden = {name for name in vars(cls) if not name.startswith("__") and any(hasattr(b, name) for b in bases)}
        read = {name for name in attributes(cls, ast.Load) if name.startswith("_")} - known
        missing = sorted((overridden | read) - members - {"_abc_impl"})
        assert not missing, f"{module}.{cls.__name__}: list {', '.join(missing)} in the members of {bases[0].__name__}"
    assert checked


def attributes(cls: type, use: type[ast.expr_context]) -> set[str]:
    """Attributes of `self` that the methods of a class read (ast.Load) or set (ast.Store)."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
    return {
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, use) and ast.unparse(n.value) == "self"
    }


def test_a_name_that_moved_says_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an import has Ray's version, the name and its use."""
    for path in ("ray._private.node:Moved", "ray._private.gone:Node"):
        monkeypatch.setitem(NAMES, "Node", PrivateName(path, "a private Ray", "nothing"))
        with pytest.raises(
            ImportError,
            match=rf"Ray {re.escape(ray.__version__)}: {path.replace(':', '.')} moved: used for: a private Ray",
        ):
            from raydist.cluster.ray_private import Node  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from raydist.cluster.ray_private import Nothing  # noqa: F401


def test_the_label_of_a_node() -> None:
    """nodes.NODE_ID_LABEL is the label that Ray documents, and that this Ray sets."""
    raylet: ModuleType = importlib.import_module("ray._raylet")
    assert raylet.RAY_NODE_ID_KEY == nodes.NODE_ID_LABEL


def test_one_minor_version_of_ray() -> None:
    """pyproject.toml allows the Ray of constraints.txt, which CI tests, but neither the previous nor the next minor version."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    [required] = [r for r in map(Requirement, project["dependencies"]) if r.name == "ray"]
    [tested] = re.findall(r"^ray==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    major, minor = (int(part) for part in tested.split(".")[:2])
    assert required.specifier.contains(tested)
    assert not required.specifier.contains(f"{major}.{minor + 1}.0")
    assert not required.specifier.contains(f"{major}.{minor - 1}.9")
