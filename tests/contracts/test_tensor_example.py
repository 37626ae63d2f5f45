"""The model of docs/reference/models.md that has tensor rules: complete, and split as the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.errors import SpecError
from raydist.spec import JobSpec, parse
from raydist.worker.distributed import Rank
from tests.contracts import test_models, test_tensor
from tests.training import alone, run

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
FILES = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
NAME = "my_split_model:build"
MODEL = {**test_tensor.WIDE, "name": NAME}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the page's file, on the import path."""
    made = tmp_path_factory.mktemp("models")
    for name, text in FILES:
        (made / name).write_text(text)
    sys.path.insert(0, str(made))
    yield made
    sys.path.remove(str(made))
    for name, _ in FILES:
        sys.modules.pop(Path(name).stem, None)


def test_it_is_the_only_python_on_the_page() -> None:
    """So no block of the page is untested."""
    assert [name for name, _ in FILES] == ["my_split_model.py"]
    assert PAGE.read_text().count("```python") == 1


def test_the_model_keeps_its_contract() -> None:
    """It passes the tests of the built-in models."""
    test_models.test_logits_of_the_vocabulary(NAME)
    test_models.test_the_seed_decides_the_weights(NAME)
    test_models.test_gradients_reach_every_parameter(NAME)
    test_models.test_causal(NAME)


def trained(rank: Rank, folder: str, spec: JobSpec) -> test_tensor.Result:
    """Two steps, where the folder is on the import path."""
    sys.path.insert(0, folder)
    try:
        return test_tensor.train(rank, spec)
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("zero3", 4)])
def test_two_ranks_share_its_layers(ranks: Any, folder: Path, strategy: str, world: int) -> None:
    """First weights, losses, norms and each gradient are those of one process, with dropout."""
    model = {**MODEL, "dropout": 0.2}
    right = test_tensor.train(alone(), test_tensor.job("ddp", model))
    for got in run(ranks, trained, world, str(folder), test_tensor.mesh_job(strategy, 2, model)):
        test_tensor.compare(got, right)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    """The job is refused before torch is needed, by the file's own `check_tensor`."""
    tree = {"data": {"source": "any"}, "train": {"steps": 1}, "model": {**MODEL, "heads": 2},
            "parallel": {"tensor": 4}, "cluster": {"workers": 4}}  # fmt: skip
    with pytest.raises(SpecError, match=r"heads: 2 cannot be shared by parallel\.tensor: 4 ranks"):
        parse(tree)
