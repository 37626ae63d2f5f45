"""What a group of workers says of itself, without Ray. test_fit.py and tests/end_to_end have real ones."""

from __future__ import annotations

import threading

import pytest

from raydist.cluster.run import worker_group
from raydist.cluster.run.fit import AbortHandle
from raydist.cluster.run.worker_group import Group


@pytest.fixture
def group() -> Group:
    """One that runs, of three agents."""
    made = object.__new__(Group)
    made._thread, made.size, made._abort, made._nodes = threading.current_thread(), 3, AbortHandle(), None
    return made


def test_the_next_attempt_has_the_agents_of_nodes_that_lost_none(group: Group) -> None:
    """An agent may die before it has said where it is: no node is left out for it, and a new group replaces this one."""
    assert (group.living, group.lost) == (3, set())
    for entries, living, lost in (
        ([("a", True), ("a", True), ("b", False)], 2, {"b"}),
        ([("a", True), ("a", False), ("b", True)], 0, {"a"}),
        ([("a", True), ("b", True), ("", False)], 0, set()),
    ):
        group._nodes = entries
        assert (group.living, group.lost) == (living, lost)


def test_an_error_of_the_groups_thread_is_the_attempts(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither lost nor replaced by one of this module."""
    monkeypatch.setattr(worker_group.nodes, "unreachable", lambda nodes: set())
    group._result = KeyError("no such label")
    with pytest.raises(KeyError, match="no such label"):
        group._ended()
