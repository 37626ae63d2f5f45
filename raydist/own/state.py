"""The state of the user's objects in checkpoints: of a stream of samples, of a learning rate scheduler."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raydist.errors import CheckpointError, UserError
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank


class ValueState:
    """An `ExtraState`: the `state_dict` of an object, as JSON, or where it has tensors, tuples and the like as the bytes of
    torch.save, of which `weights_only` loads all."""

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
        """{"json": ...} or {"torch": ...}. Raises UserError for a state that could not be loaded again."""
        state = self._of.state_dict() if self._kept is None else self._kept
        try:
            if json.loads(json.dumps(state)) == state:
                return {"json": state}
        except (TypeError, ValueError, RuntimeError):  # a tensor has no truth value
            pass
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._name}: the state_dict of {type(self._of).__name__} holds more than tensors and plain values: "
                f"{str(error).splitlines()[0]}",
                "leave functions and objects of classes out of it",
            ) from error
        return {"torch": base64.b64encode(buffer.getvalue()).decode()}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """See `ExtraState`."""
        if "torch" in values:
            state = torch.load(io.BytesIO(base64.b64decode(values["torch"])), weights_only=True)
        elif "json" in values:
            state = values["json"]
        else:
            raise CheckpointError(f"{self._name}: its saved state is in no known form: {', '.join(values)}", "")
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
