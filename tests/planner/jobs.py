"""The jobs that the tests of plans are about."""

from __future__ import annotations

from typing import Any

from raydist.spec import JobSpec

VOCAB = 1021  # rows are not divisible by the number of ranks
SMALL = {"layers": 4, "width": 128, "heads": 4, "context": 128}


def job(**sections: Any) -> JobSpec:
    """The smallest valid spec, with these sections."""
    plain = {"data": {"source": "any"}, "train": {"steps": 1, "global_batch": 8, "micro_batch": 4}, "model": SMALL}
    return JobSpec.model_validate(
        {**plain, **{k: {**plain[k], **v} if k in plain else v for k, v in sections.items()}}  # type: ignore[dict-item]
    )
