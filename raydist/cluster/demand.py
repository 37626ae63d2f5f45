"""What a run that may grow would take more of, told to Ray: placement groups of one worker each, which wait for room.

Runs in: the driver. Imports ray in functions only; never torch.

An autoscaler starts nodes for placement groups that wait, v1 and v2 alike. `ray.autoscaler.sdk.request_resources`, which Ray
Train's elastic policy ends in, says how large the whole cluster is to be: room that another job has taken counts as room, the call
replaces that of anybody else, and holds until somebody takes it back. A placement group is asked for beside what others use, and
goes with the job that made it, also where its driver is killed. Without an autoscaler it keeps what becomes free for the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any


class Demand:
    """Of one run. What it has got is room like any other, `held`, which has to be let go with `drop` before it is used."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._asked: tuple[Mapping[str, float], frozenset[str]] | None = None

    def ask(self, workers: int, each: Mapping[str, float], avoid: Collection[str]) -> None:
        """Room for so many workers of resources `each` in all, on none of the nodes in `avoid`. Call it as often as you like."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        asked = {name: count for name, count in each.items() if count}, frozenset(avoid)
        if asked != self._asked:
            self.drop()
            self._asked = asked
        elsewhere = [{ray._raylet.RAY_NODE_ID_KEY: f"!in({','.join(sorted(avoid))})"}] if avoid else None
        while len(self._groups) < workers:
            self._groups.append(placement_group([asked[0]], bundle_label_selector=elsewhere))
        while len(self._groups) > max(workers, 0):
            remove_placement_group(self._groups.pop())

    @property
    def held(self) -> Counter[str]:
        """Node id -> workers there is room for, of those that were asked for."""
        from ray.util.placement_group import placement_group_table

        ours = {group.id.hex() for group in self._groups}
        facts = placement_group_table() if ours else {}
        there = [facts[group] for group in ours & facts.keys() if facts[group]["state"] == "CREATED"]
        return Counter(node for group in there for node in group["bundles_to_node_id"].values())

    def drop(self) -> None:
        """Nothing is asked for any more, and what was got is free."""
        from ray.util.placement_group import remove_placement_group

        while self._groups:
            remove_placement_group(self._groups.pop())
