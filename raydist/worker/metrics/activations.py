"""The size of each layer's output: the root mean square of its elements, in the steps that have histograms.

Runs in: each train worker. Torch, never ray.

A layer is a module with trained weights of its own; its name is theirs without the last part. A hook of each reads its output in
one pass, where it was made, and nothing waits for it. Layers that torch.compile has merged into one graph have no output of their
own: with train.compile nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydist.worker.parallel._model_graph import plain_name


class ActivationSizes:
    """`names`: the trained parameters of all ranks, in the same order on each. `parts`: this rank's part of the model."""

    def __init__(self, parts: Iterable[nn.Module], names: Sequence[str], device: torch.device) -> None:
        self._layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        self._device = device
        self._sums: Tensor | None = None
        """[layers, 2] in float64, while they are taken: elements, and the sum of their squares."""
        places = {name: place for place, name in enumerate(self._layers) if name}
        for part in parts:
            for name, module in part.named_modules():
                if (place := places.get(plain_name(name))) is not None:
                    module.register_forward_hook(partial(self._passed, place))

    def begin(self) -> None:
        """From here on outputs count."""
        self._sums = torch.zeros(len(self._layers), 2, dtype=torch.float64, device=self._device)

    def end(self, summed: bool) -> dict[str, float]:
        """Layer -> root mean square of its output since `begin`, without layers that had none; `summed`: over all ranks, a
        collective. A step that is computed anew begins anew."""
        sums, self._sums = self._sums, None
        assert sums is not None
        if summed:
            dist.all_reduce(sums)
        rows = zip(self._layers, sums.tolist(), strict=True)
        return {name: (squares / count) ** 0.5 for name, (count, squares) in rows if count}

    def _passed(self, place: int, module: nn.Module, arguments: Any, output: Any) -> None:
        """A forward pass of a layer; of one that is recomputed twice, which leaves the mean as it is."""
        if self._sums is None or not module.training:
            return
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel():
            with torch.no_grad():
                norm = torch.linalg.vector_norm(first.detach(), dtype=torch.float32).double()
                self._sums[place, 0] += first.numel()
                self._sums[place, 1] += norm * norm
