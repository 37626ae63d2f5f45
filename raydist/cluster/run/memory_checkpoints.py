"""Snapshots of the training state in the nodes' memory: found after a failure, and sent to the nodes that need them.

Runs in: the driver; RestartLoop calls it. Imports ray in its functions only. The part of each node is memory_store.py.

    MemoryCheckpoints.job(ranks) = inventories -> memory_checkpoint_recovery.place -> fetch on the nodes that lack something

With 1,250 nodes, a call of each takes the driver half a second, so it asks only those of which it does not know what they have.

If something fails here, a restart resumes from storage.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raydist.checkpoint import memory_layout
from raydist.cluster.nodes import listed
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Fetch, Inventory, Placement, place, presumed
from raydist.cluster.run.memory_store import MemoryStore, start_actor
from raydist.run.directory import RunDir

_ASK_S = 5.0
_FETCH_S = 60.0
_LINK_S, _RENUMBERED_S = 1.0, 2.0
"""How often to look whether a memory store was killed, and when to tell those whose node's ranks alone have changed: after a lost
node these are all, and the order to train is first."""
_Link = tuple[Any, Sequence[int], int]
"""Of a node's memory store: its buddy, or None, its node's ranks, and the world size."""
_USES = 2
"""Attempts that may resume from one snapshot without making a newer one; the next one resumes from storage."""


@dataclass(frozen=True, slots=True)
class _Before:
    """The last attempt: rank -> node, and step and manifest of the snapshot that it resumed from."""

    attempt: int
    ranks: Mapping[int, str]
    resumed: tuple[int | None, str | None]


class MemoryCheckpoints:
    """All memory stores of a run. No method raises: if there is no usable snapshot, `job` names none.

    `private`: all is on this host, and no actor is needed. `note` is called with a line about each error.
    """

    def __init__(self, run: RunDir, *, private: bool, note: Callable[[str], None]) -> None:
        self._run, self._private, self._note = run, private, note
        self.folder = memory_layout.new_folder()
        self._nodes: dict[str, Any] = {}
        self._links: dict[str, _Link] = {}
        self._sent_links: dict[str, _Link] = {}
        """The newest link that each memory store has received."""
        self._running: dict[Any, str] = {}
        """Of each memory store its call of `closed`, which fails when the store's process is killed -> its node."""
        self._killed: set[str] = set()
        """Nodes whose memory store was killed since they were asked last."""
        self._before: _Before | None = None
        self._used: dict[int, int] = {}
        self._link_at = math.inf
        """When the thread may tell memory stores their ranks."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        if not private:
            threading.Thread(target=self._relink, name="raydist-memory-links", daemon=True).start()

    def job(self, attempt: int, ranks: Mapping[int, str], gone: Collection[str] = ()) -> dict[str, Any]:
        """The `memory_store` of every rank's job. Returns when the files that single ranks need are on their nodes. `attempt`: the
        next one; `ranks`: rank -> node id. `gone`: nodes that do not answer, of which Ray may not know yet: they are not asked.
        """
        job: dict[str, Any] = {"folder": self.folder, "step": None, "manifest": None}
        self._link_at = math.inf
        try:
            fresh = self._start(ranks)
            if fresh != set(self._nodes):
                job |= self._chosen(ranks, gone)
            self._link(at_once=())
            self._leave(set(ranks.values()))
        except Exception as error:
            self._note(f"the run does not resume from a copy in memory: {type(error).__name__}: {error}")
        self._before = _Before(attempt, dict(ranks), (job["step"], job["manifest"]))
        self._link_at = time.monotonic() + _RENUMBERED_S
        return job

    def close(self) -> None:
        """The run is over: removes all copies."""
        self._ended.set()
        with self._lock:
            nodes, self._nodes = self._nodes, {}
            self._links, self._running = {}, {}  # the thread calls Ray no more
        if self._private:
            for memory_store in nodes.values():
                memory_store.close()
            return
        import ray

        if nodes:
            ray.wait(
                [memory_store.close.remote() for memory_store in nodes.values()], num_returns=len(nodes), timeout=_ASK_S
            )
        for memory_store in nodes.values():
            ray.kill(memory_store)

    # --- inside

    def _start(self, ranks: Mapping[int, str]) -> set[str]:
        """Starts a MemoryStore on each node that has ranks. The nodes with a new one. Each node is the buddy of the one before."""
        fresh = set(ranks.values()) - set(self._nodes)
        for node in fresh:
            self._nodes[node] = MemoryStore(self.folder) if self._private else start_actor(self.folder, node)
        ours: dict[str, list[int]] = {}
        for rank, node in ranks.items():
            ours.setdefault(node, []).append(rank)
        ring = sorted(ours)
        with self._lock:
            self._links = {}
            for node, after in zip(ring, [*ring[1:], *ring[:1]], strict=True):
                buddy = self._nodes[after] if after != node else None
                self._links[node] = (buddy, ours[node], len(ranks))
            if not self._private:
                self._running |= {self._nodes[node].closed.remote(): node for node in fresh}
        return fresh

    def _link(self, at_once: Collection[str] | None = None) -> None:
        """Tells each memory store its buddy and ranks, if they have changed. Those with the same buddy, and not in `at_once`, are
        told by the thread, later; None: all now.
        """
        with self._lock:
            for node, (buddy, *_) in self._links.items():
                told = self._sent_links.get(node)
                later = at_once is not None and node not in at_once and told is not None and told[0] is buddy
                if not (later and not self._private) and (link := self._news(node)):
                    if self._private:
                        self._nodes[node].link(*link)
                    else:
                        self._nodes[node].link.remote(*link)

    def _news(self, node: str) -> tuple[Any, ...]:
        """What `link` is to tell that node's memory store; () if it knows. With the lock."""
        link = self._links.get(node)
        if link is None or self._sent_links.get(node) == link:
            return ()
        self._sent_links[node] = link
        return (None if self._private else self._nodes[node], *link)

    def _relink(self) -> None:
        """Ray restarts a MemoryStore that was killed, which then does not know its buddy."""
        while not self._ended.wait(_LINK_S):
            with contextlib.suppress(Exception):
                self._restarted()
                if time.monotonic() >= self._link_at:
                    self._link()

    def _restarted(self) -> None:
        """Notes which memory stores were killed: they have no link, and their files may be gone."""
        import ray

        with self._lock:
            if not self._running:
                return
            for call in ray.wait(list(self._running), num_returns=len(self._running), timeout=0, fetch_local=False)[0]:
                node = self._running.pop(call)
                if node in self._nodes:
                    self._killed.add(node)
                    self._sent_links.pop(node, None)
                    self._running[self._nodes[node].closed.remote()] = node

    def _chosen(self, ranks: Mapping[int, str], gone: Collection[str]) -> dict[str, Any]:
        """Asks first only the nodes of which it is not known what they have, and all others if that does not suffice."""
        committed, lineage = self._run.newest_step(), self._run.lineage()
        alive = self._alive().difference(gone)
        first, inventories, problem = self._unsure(alive), dict[str, Inventory](), ""

        def counts(copy: Copy) -> bool:
            return lineage.voided_by(copy.attempt, copy.step) is None and self._used.get(copy.step, 0) < _USES

        for asked, others in ((first, partial(self._presumed, alive - first)), (alive - first, None)):
            with self._lock:  # one message tells the links, too
                calls = {node: ("inventory", self._news(node)) for node in asked}
            inventories |= self._ask(calls, _ASK_S)
            found = place(inventories, ranks, after=committed, counts=counts, others=others)
            if found is None:
                continue
            self._link(at_once={ranks[0], *found.fetches})  # a node that fetches a file of its ranks tells its buddy
            step, manifest = found.copy.step, found.copy.manifest
            if not (problems := self._fetched(found, ranks[0])):
                self._used[step] = self._used.get(step, 0) + 1
                return {"step": step, "manifest": manifest}
            problem = f"the run does not resume from the copy in memory of step {step}: {problems[0]}"
        if problem:
            self._note(problem)
        return {}

    def _unsure(self, alive: set[str]) -> set[str]:
        """Those of the living nodes that have to say what they have: new ones, those whose memory store was killed, those that may
        have the manifest, and the buddies of lost ones.
        """
        if self._before is None:
            return alive
        self._restarted()
        with self._lock:
            killed, self._killed = self._killed, set()
        ring = sorted(set(self._before.ranks.values()))
        buddies = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        unsure = killed.union(alive.difference(ring), {self._before.ranks[0]})
        return alive & unsure.union(buddies[node] for node in ring if node in unsure or node not in alive)

    def _presumed(self, unasked: Collection[str], copy: Copy) -> Mapping[str, Inventory]:
        """What nodes that were not asked have of a copy: what their ranks of the last attempt saved in it, or resumed from."""
        before = self._before
        if before is None or len(before.ranks) != copy.world_size:
            return {}
        again = (copy.step, copy.manifest) == before.resumed
        ranks = {rank: node for rank, node in before.ranks.items() if node in unasked}
        return presumed(copy, ranks, peers=again) if again or copy.attempt == before.attempt else {}

    def _fetched(self, found: Placement, first: str) -> list[str]:
        """A line for each file that a node could not fetch. `first`: the node of rank 0."""
        if self._private:
            return []  # all files are on this host
        calls = {}
        for node, own in {first: (), **found.fetches}.items():
            wanted = [*own, Fetch(found.copy.manifest, 0, found.manifest_from)] if node == first else own
            calls[node] = ("fetch", (found.copy.step, wanted, self._sources(wanted)))
        answers = self._ask(calls, _FETCH_S)
        problems = [p for problems in answers.values() for p in problems]
        return problems + [f"node {node} does not answer" for node in calls if node not in answers]

    def _sources(self, wanted: Sequence[Fetch]) -> dict[str, Any]:
        return {source: self._nodes[source] for source in {fetch.source for fetch in wanted}}

    def _leave(self, nodes: set[str]) -> None:
        """Ends the MemoryStores of nodes without ranks: the files that were needed have been fetched."""
        gone = self._nodes.keys() - nodes
        with self._lock:
            left = [self._nodes.pop(node) for node in gone]
            for node in gone:
                self._sent_links.pop(node, None)
            self._running = {call: node for call, node in self._running.items() if node not in gone}
        if left:
            import ray

            for memory_store in left:
                ray.kill(memory_store)  # its cleaner removes the folder

    def _alive(self) -> set[str]:
        if self._private:
            return set(self._nodes)
        return set(self._nodes) & {node["NodeID"] for node in listed() if node["Alive"]}

    def _ask(self, calls: Mapping[str, tuple[str, Sequence[Any]]], timeout_s: float) -> dict[str, Any]:
        """node -> the answer of its MemoryStore, without those that fail or do not answer in time."""
        if self._private:
            return {node: getattr(self._nodes[node], method)(*given) for node, (method, given) in calls.items()}
        import ray
        from ray.exceptions import RayError

        refs = {getattr(self._nodes[node], method).remote(*given): node for node, (method, given) in calls.items()}
        answers = {}
        if refs:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
            try:
                return {refs[ref]: answer for ref, answer in zip(done, ray.get(done), strict=True)}
            except RayError:
                for ref in done:
                    with contextlib.suppress(RayError):
                        answers[refs[ref]] = ray.get(ref)
        return answers
