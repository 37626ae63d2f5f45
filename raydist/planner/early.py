"""Whether workers would refuse a job once they have its model: before any of them starts, without memory or values.

Runs in: a process of its own, which the driver waits for. Torch, never ray. Of the stages of built-in models the spec knows it
(spec/mesh.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raydist.planner.measure import Planner
from raydist.spec import JobSpec
from raydist.spec.load import naming


def check(spec: Mapping[str, Any], vocab_size: int, source: str) -> None:
    """Of a job as plain values, which `source` names. Where the model cannot be built without values, nothing is known.

    Raises UserError if a model of one's own cannot be cut into the stages of the pipeline, or the compressor takes none of its
    parameters.
    """
    with naming(source):
        Planner(JobSpec.model_validate(spec), vocab_size, "cpu").checked()
