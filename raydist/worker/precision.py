"""The number format of forward and backward, and fp16's dynamic loss scale.

Runs in: each train worker. Torch, never ray.

Weights, gradients and the update are fp32. Autocast computes matrix products in bf16 or fp16, and operations that need range in
fp32. This is not torch's GradScaler: the global gradient norm, which every rank has anyway, shows whether a step overflowed. So all
ranks skip the same steps under every sharding, without a second pass over the gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raydist.errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from raydist.spec import PrecisionSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The number format of a step, which uses it in this order:

    with precision.autocast():
        loss = forward(batch)
    precision.scale(loss).backward()
    # the gradient is `loss_scale` times too large; if its global norm is not finite, skip the update
    precision.update(overflow=skipped)
    """

    def __init__(self, spec: PrecisionSpec, device: torch.device) -> None:
        """Raises UserError for a scale that starts below its floor. `refuse` checks the device."""
        self.dtype = DTYPES[spec.params]
        self.device = device
        self.scaled = self.dtype is torch.float16
        """Whether the loss is scaled: only in fp16. An overflow is then not an error."""
        self.loss_scale = spec.loss_scale.initial if self.scaled else 1.0
        """The factor of the loss, by which the gradients must be divided; 1 except in fp16."""
        self._window, self._floor = spec.loss_scale.window, spec.loss_scale.floor
        self._good_steps = 0
        if self.scaled and self.loss_scale < self._floor:
            raise UserError(
                f"precision.loss_scale.initial: {self.loss_scale:g} is below floor {self._floor:g}",
                "raise initial or lower floor",
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward and loss; does nothing in fp32."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for backward: multiplied by the loss scale."""
        return loss * self.loss_scale if self.scaled else loss

    def update(self, overflow: bool) -> None:
        """After each step, with the same `overflow` on every rank. An overflow halves the scale; `window` good steps double it.

        Raises TrainingStopped, before anything changes, if half the scale is below `floor`.
        """
        if not self.scaled:
            assert not overflow, "without a loss scale a gradient that is not finite is an error, not an overflow"
            return
        if overflow:
            if self.loss_scale / 2 < self._floor:
                raise TrainingStopped(
                    f"fp16: the gradient overflows at loss scale {self.loss_scale:g}, and half of it is below "
                    f"precision.loss_scale.floor {self._floor:g}",
                    "the gradients themselves grow without bound: lower optim.lr, lengthen the warm-up, or use bf16",
                )
            self.loss_scale /= 2
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps >= self._window:
            self.loss_scale *= 2
            self._good_steps = 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers; empty without a loss scale."""
        return {"loss_scale": self.loss_scale, "good_steps": self._good_steps} if self.scaled else {}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. An empty state, of a run in another format, keeps the initial scale."""
        if self.scaled and state:
            self.loss_scale = float(state["loss_scale"])
            self._good_steps = int(state["good_steps"])


def refuse(spec: PrecisionSpec, device: torch.device) -> None:
    """Raises UserError if the device cannot compute in this format, or only at a small fraction of its speed."""
    if spec.params == "fp16" and device.type == "cpu":
        # Measured: a 512 x 512 product takes 40 times as long as in fp32.
        raise UserError("precision: fp16 on a CPU: torch has no fast fp16 matrix kernels there", "use fp32 or bf16")
    if spec.params == "bf16" and device.type == "cuda" and not _has_bf16(device):
        raise UserError(
            f"precision: bf16 on {torch.cuda.get_device_name(device)}, which has no bf16 units", "use fp16 or fp32"
        )


def _has_bf16(device: torch.device) -> bool:
    # bf16 came with compute capability 8.0; torch.cuda.is_bf16_supported also counts emulation. ROCm's GPUs have it.
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
