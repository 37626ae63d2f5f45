"""At which steps outer steps start and arrive. It depends on the step's number alone, so that a resumed run does the same.

Runs in: each train worker. Imports nothing of torch.

    every 8, fragments 2, delay 1      step    1 2 3 4 5 6 7 8 9
                                       starts        0       1
                                       arrives         0       1
"""

from __future__ import annotations

from dataclasses import dataclass

from raydist.spec import CommSpec


@dataclass(frozen=True, slots=True)
class Schedule:
    """Of a run of `total` steps: after the last one all replicas hold the outer weights."""

    every: int
    fragments: int
    delay: int
    total: int

    @classmethod
    def of(cls, spec: CommSpec, total: int) -> Schedule:
        """That of a job with `every`."""
        assert spec.every is not None
        return cls(spec.every, spec.fragments, spec.delay, total)

    def starts(self, step: int) -> tuple[int, ...]:
        """The fragments whose outer step starts after the update of this step; after the last one all."""
        if step == self.total:
            return (*range(self.fragments),)
        apart = self.every // self.fragments
        return () if step % apart else ((step // apart - 1) % self.fragments,)

    def arrives(self, step: int) -> int:
        """When the result of an outer step that starts after `step` arrives: after the update of this one."""
        return min(step + self.delay, self.total)

    def together(self, step: int) -> bool:
        """Whether after this step all replicas hold the same weights: those of one outer step."""
        return step == self.total or (self.fragments == 1 and self.delay == 0 and step % self.every == 0)
