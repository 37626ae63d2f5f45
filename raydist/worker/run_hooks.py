"""Calls the hooks of a job (raydist/worker/hooks), reports or raises their errors, and checks that they have changed no weight.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raydist import registry
from raydist.errors import HookFailed
from raydist.records import Event
from raydist.spec.running import HookSpec
from raydist.worker.hooks import HookFacts


@dataclass(slots=True)
class _Made:
    spec: HookSpec
    hook: Any
    reported: bool = False


class RunHooks:
    """The hooks of this rank. `make(options)` gives the facts for one; `tell` sends an event, and must not block.

    Raises HookFailed if a hook cannot be made.
    """

    def __init__(
        self,
        specs: Sequence[HookSpec],
        make: Callable[[dict[str, Any]], HookFacts],
        first: bool,
        tell: Callable[[Event], None],
    ) -> None:
        self._tell = tell
        self._model: nn.Module | None = None
        self._changed = False
        self._known: dict[str, int] | None = None
        """The state after the last hook, while no other code changes it."""
        self._spent, self._since = 0.0, 0.0
        self._made: list[_Made] = []
        for spec in specs:
            if spec.ranks == "all" or first:
                facts = make(spec.options)
                self._model = facts.model
                kind = self._run(spec, "", partial(registry.load, "hook", spec.name))
                self._made.append(_Made(spec, self._run(spec, "", partial(kind, facts))))

    def __bool__(self) -> bool:
        return bool(self._made)

    def spent(self) -> dict[str, float]:
        """Telemetry's column of the time in hooks, with the present call. Thread-safe."""
        since = self._since
        return {"hooks_seconds": self._spent + (time.perf_counter() - since if since else 0.0)}

    def call(self, method: str, *arguments: Any) -> None:
        """Calls that method of each hook that has it. Raises HookFailed if one changes weights, or raises and is to end the run."""
        if not self._made:
            return
        self._since, self._known = time.perf_counter(), None
        try:
            self._call(method, *arguments)
        finally:
            self._spent, self._since = self._spent + time.perf_counter() - self._since, 0.0

    def _call(self, method: str, *arguments: Any) -> None:
        for made in self._made:
            if (function := getattr(made.hook, method, None)) is None:
                continue
            try:
                self._run(made.spec, f".{method}", partial(function, *arguments))
            except HookFailed as error:
                if made.spec.on_error == "stop" or self._changed:
                    raise
                if not made.reported:
                    made.reported = True
                    text = f"{error.message}; the run continues, and further errors of this hook are not shown"
                    self._tell(Event("note", time.time(), {"text": text}))

    def _run(self, spec: HookSpec, where: str, function: Callable[[], Any]) -> Any:
        """The result of the function. Raises HookFailed for its error, and if it has changed weights, whether it raises or not."""
        before = self._state() if self._known is None else self._known
        self._known, result, failed = None, None, None
        try:
            result = function()
        except Exception as error:
            failed = error
        after = self._state()
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if changed:
            self._changed = True  # training on would be silently wrong
            raise HookFailed(
                f"hook {spec.name}{where} has changed {changed[0]}",
                "a hook may only read the model; what changes weights belongs in the model, the optimizer or the loss",
            ) from failed
        if failed is not None:
            raise HookFailed(
                f"hook {spec.name}{where}: {type(failed).__name__}: {failed}",
                "fix it, or set on_error: report in hooks, with which the run continues without it",
            ) from failed
        self._known = after
        return result

    def _state(self) -> dict[str, int]:
        """What a hook could change: each module's mode, which parameters are trained, and a checksum of this rank's part of each
        parameter, gradient and buffer, exact: it changes if a bit does, but for rare coincidences."""
        if self._model is None:
            return {}
        found = dict(_tensors(self._model))
        with torch.no_grad():
            sums = [_checksum(tensor) for tensor in found.values()]
            bits = torch.stack(sums).tolist() if sums else []
        modes = {
            f"{name or 'the model'}'s mode (train or eval)": int(m.training) for name, m in self._model.named_modules()
        }
        trained = {f"whether {name} is trained": int(p.requires_grad) for name, p in self._model.named_parameters()}
        return dict(zip(found, bits, strict=True)) | modes | trained


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gradients, too: between steps there are none, and the next backward pass would add to one that a hook has left."""
    parameters = dict(model.named_parameters())
    left = [(f"the gradient of {name}", p.grad) for name, p in parameters.items() if p.grad is not None]
    for name, value in (*parameters.items(), *model.named_buffers(), *left):
        local = value.to_local() if isinstance(value, DTensor) else value.detach()
        if local.numel() and not local.is_meta:
            yield name, local


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _checksum(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bits, as integers that wrap around."""
    return tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
