"""Whether a model of one's own can be cut into the stages of a job's pipeline: before any worker starts, without memory or values.

Runs in: a process of its own, which the driver waits for. Torch, never ray. Of built-in models the spec knows it (spec/mesh.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from raydist import registry
from raydist.errors import RaydistError
from raydist.spec import JobSpec
from raydist.worker.parallel._stages import StageCut, cut_model


def check(spec: Mapping[str, Any], vocab_size: int) -> None:
    """`cut_without_values` of a job as plain values."""
    cut_without_values(JobSpec.model_validate(spec), vocab_size)


def cut_without_values(job: JobSpec, vocab_size: int) -> StageCut | None:
    """Where the model is cut. None if it cannot be built or cut without values: its workers cut it before they train.

    Raises UserError if it has no stages, fewer blocks than stages, or other ones than `pipeline_cut` counts.
    """
    build = registry.load("model", job.model.name)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return cut_model(build(job.model, job.model.rows(vocab_size)), job)
    except RaydistError:
        raise
    except Exception:  # whatever the user's code raises where there are no values
        return None
