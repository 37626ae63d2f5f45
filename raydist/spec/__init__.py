"""What was asked: a YAML file with `extends:`, overrides, and errors that say how to mend them.

Runs anywhere: plain python, pydantic and yaml.
"""

from raydist.spec.load import dump, load, merge, parse, read_tree, spec_hash, stored
from raydist.spec.models import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    EvalSpec,
    JobSpec,
    ModelSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RecoverySpec,
    ScheduleSpec,
    TrainSpec,
)

__all__ = [
    "CheckpointSpec",
    "ClusterSpec",
    "DataSpec",
    "EvalSpec",
    "JobSpec",
    "ModelSpec",
    "OptimSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "RecoverySpec",
    "ScheduleSpec",
    "TrainSpec",
    "dump",
    "load",
    "merge",
    "parse",
    "read_tree",
    "spec_hash",
    "stored",
]
