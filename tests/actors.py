"""Of Ray's actors, for tests that kill or end one."""

from __future__ import annotations

from typing import Any

import ray


def gone(actor: Any) -> bool:
    """Whether it has ended for good."""
    try:
        ray.get(actor.__ray_ready__.remote())
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.ActorUnavailableError:
        return False  # its connection is closed, and Ray does not know yet that it has ended
    return False
