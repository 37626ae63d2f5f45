"""The job file: YAML with `extends:`, overrides, and errors that name the remedy.

Runs anywhere: plain python, pydantic and yaml.
"""

from raydist.spec.load import dump, load, merge, parse, read_stored, read_tree, spec_hash, stored
from raydist.spec.models import (
    CheckpointSpec,
    ClusterSpec,
    CommSpec,
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
    "CommSpec",
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
    "read_stored",
    "read_tree",
    "spec_hash",
    "stored",
]
