"""The order of `make test`: a file stays in one process, and the tests of ALONE run when nothing else does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scheduling import ALONE, WAITING, Scheduling, give_way

ROOT = Path(__file__).parents[1]
LONE = ALONE[0]


class Process:
    """A worker of xdist, as the scheduler sees it: it does not begin its last test until it has the next one."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.waiting: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def next(self) -> int | None:
        """The test that is running now."""
        return self.waiting[0] if len(self.waiting) > 1 or (self.waiting and self.shutting_down) else None


def files(*counts: int) -> list[str]:
    """This many tests in each file."""
    return [f"tests/test_{file}.py::test_{test}" for file, count in enumerate(counts) for test in range(count)]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("lone", [0, 1, 5])
@pytest.mark.parametrize("waiting", [0, 1, 4])
@pytest.mark.parametrize("others", [files(), files(1), files(3, 1), files(1, 4, 9, 2, 2, 1, 1, 6)])
def test_each_test_runs_once_and_some_alone(processes: int, lone: int, waiting: int, others: list[str]) -> None:
    """At any relative speed: a file's tests run in order and in one process, the first file first; those of ALONE run alone; the
    third process has those of WAITING, and nothing else."""
    wait = [f"{file}::test_{i}" for file in WAITING[:waiting] for i in range(3)]
    tests = [*others[:3], *(f"{LONE}::test_{i}" for i in range(lone)), *wait, *others[3:]]
    for slow in range(processes):
        nodes = [Process(f"gw{i}") for i in range(processes)]
        config = SimpleNamespace(
            getvalue=lambda name: ["popen"] * processes, option=SimpleNamespace(loadscopereorder=True)
        )
        made = Scheduling(config, None)
        for node in nodes:
            made.add_node(node)
            made.add_node_collection(node, tests)
        made.schedule()
        ran: list[tuple[str, int]] = []
        turn = 0
        while running := [node for node in nodes if node.next() is not None]:
            turn += 1
            lonely = [node for node in running if tests[node.waiting[0]].startswith(LONE)]
            assert not lonely or len(running) == 1
            quick = [node for node in running if node is not nodes[slow] or turn % 7 == 0] or running
            node = quick[turn % len(quick)]
            test = node.waiting.pop(0)
            ran.append((node.gateway.id, test))
            made.mark_test_complete(node, test)
            if made.tests_finished:  # the condition under which xdist calls it
                for each in nodes:
                    each.shutdown()
        assert sorted(test for _, test in ran) == list(range(len(tests)))
        assert made.tests_finished
        for file in {test.partition("::")[0] for test in tests}:
            mine = [(node, test) for node, test in ran if tests[test].startswith(file)]
            assert len({node for node, _ in mine}) == 1
            assert mine == sorted(mine)
        if others:
            assert next(test for node, test in ran if node == "gw0") == 0
        if processes == 3 and others:
            assert {tests[test] for node, test in ran if node == "gw2"} <= {*wait, *(t for t in tests if LONE in t)}
            if wait and len(others) > 4:
                assert tests[next(test for node, test in ran if node == "gw2")] == wait[0]


def test_two_of_three_processes_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the third one, whose tests wait; two processes, or one without xdist, have the niceness that they were given."""
    nicer: list[int] = []
    monkeypatch.setattr("os.nice", nicer.append)
    for processes, times in ((3, 2), (2, 0)):
        for i in range(processes):
            give_way(SimpleNamespace(workerinput={"workerid": f"gw{i}", "workercount": processes}))  # type: ignore[arg-type]
        assert len(nicer) == times
        nicer.clear()
    give_way(SimpleNamespace())  # type: ignore[arg-type]
    assert nicer == []


def test_each_entry_exists() -> None:
    """Each entry is a file, or a test in one."""
    for name in (*ALONE, *WAITING):
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()
