"""The job file: YAML with `extends:`, overrides, and errors that name the remedy.

Runs anywhere: plain python, pydantic and yaml.
"""

from raydist.spec.comm import CommSpec
from raydist.spec.load import dump, load, merge, parse, read_stored, read_tree, spec_hash, stored
from raydist.spec.models import JobSpec
from raydist.spec.parallel import ParallelSpec
from raydist.spec.running import CheckpointSpec, ClusterSpec, RecoverySpec
from raydist.spec.training import DataSpec, EvalSpec, ModelSpec, OptimSpec, PrecisionSpec, ScheduleSpec, TrainSpec

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
