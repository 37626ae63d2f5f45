"""The state of the user's objects in checkpoints: of a stream of samples, of a learning rate scheduler.

It is stored as JSON, and parsed: nothing of a checkpoint is unpickled.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raydist.errors import CheckpointError, UserError
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank


class ValueState:
    """An `ExtraState`: the `state_dict` of an object, with tensors, bytes, plain values, and lists, tuples and dicts of these."""

    per_rank = False

    def __init__(self, of: Any, name: str) -> None:
        """`name`: of the session's argument."""
        self._of, self._name = of, name
        self._kept: Any = None

    def keep(self) -> None:
        """From here on to `drop` the state is what it is now, although the object goes on."""
        self._kept = copy.deepcopy(self._of.state_dict())

    def drop(self) -> None:
        """See `keep`."""
        self._kept = None

    def state_tensors(self) -> Mapping[str, Tensor]:
        """None: an object makes tensors of its own when it loads."""
        return {}

    def state_values(self) -> Mapping[str, Any]:
        """Raises UserError for a state that could not be loaded again."""
        try:
            return {"state": to_json(self._of.state_dict() if self._kept is None else self._kept)}
        except TypeError as error:
            raise UserError(
                f"{self._name}: the state_dict of {type(self._of).__name__} holds {error}",
                "give it tensors, bytes and plain values only",
            ) from error

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `ExtraState`."""
        try:
            state = from_json(values["state"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self._name}: its saved state cannot be read: {error}", "") from error
        self._of.load_state_dict(state)

    def check_same(self, rank: Rank) -> None:
        """Raises UserError, on every rank, if the state is not that of rank 0. A collective."""
        text = json.dumps(self.state_values(), sort_keys=True)
        every = gather_json(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), rank.control)
        if odd := [str(r) for r, theirs in enumerate(every) if theirs != every[0]]:
            raise UserError(
                f"{self._name}: its state on rank {', '.join(odd)} is another than on rank 0",
                "give every rank the same: the session divides the samples among the ranks",
            )


def to_json(value: Any) -> Any:
    """JSON of which `from_json` makes an equal value. Raises TypeError, which names the type, for another value than plain ones."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [to_json(item) for item in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]}
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`. Raises ValueError or TypeError for anything else."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "float":
        return float(inside)
    if kind == "tuple":
        return tuple(from_json(inside))
    if kind in ("dict", "counter"):
        made = {from_json(key): from_json(item) for key, item in inside}
        return Counter(made) if kind == "counter" else made
    if kind == "bytes":
        return base64.b64decode(inside)
    if kind == "tensor":
        name, shape, text = inside
        dtype, data = getattr(torch, name, None), bytearray(base64.b64decode(text))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no type of tensors: {name}")
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape).clone()
    raise ValueError(f"no kind of values: {kind}")
