"""Errors of a measurement, as Ray Train can carry them to the driver.

Runs in: every rank that Ray Train started. Never imports ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from raydist.errors import RankFailed
from raydist.launch.rank_main import facts


def carried(measure: Callable[[Mapping[str, Any]], dict[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """`measure(config)`. Re-raises every error as RankFailed, which the driver can load without the error's module."""
    try:
        return measure(config)
    except Exception as error:
        failure = facts(error, int(os.environ["RANK"]))
        raise RankFailed(**{**failure, "bases": tuple(failure["bases"])}) from error
