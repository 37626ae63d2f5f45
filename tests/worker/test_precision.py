"""Number formats and the dynamic loss scale."""

from __future__ import annotations

import json

import pytest
import torch

from raydist.errors import TrainingStopped, UserError
from raydist.spec.training import LossScaleSpec, PrecisionSpec
from raydist.worker.precision import Precision, refuse

CPU = torch.device("cpu")
GPU = torch.device("cuda")  # only its name is used: none is needed


def fp16(**loss_scale: float) -> Precision:
    return Precision(PrecisionSpec(params="fp16", loss_scale=LossScaleSpec(**loss_scale)), GPU)


@pytest.mark.parametrize(("params", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_computed_in_the_format(params, dtype):
    """Matrix products have the format's dtype; weights and their gradients stay fp32; nothing is scaled."""
    precision = Precision(PrecisionSpec(params=params), CPU)
    layer = torch.nn.Linear(4, 4)
    with precision.autocast():
        out = layer(torch.ones(2, 4))
    loss = out.float().sum()
    assert out.dtype is dtype
    assert precision.scale(loss) is loss
    assert (precision.scaled, precision.loss_scale) == (False, 1.0)
    loss.backward()
    assert layer.weight.dtype is layer.weight.grad.dtype is torch.float32


def test_fp16_on_a_cpu_is_refused():
    """The error says what to use instead."""
    with pytest.raises(UserError, match="fp16 on a CPU") as caught:
        refuse(PrecisionSpec(params="fp16"), CPU)
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_bf16_needs_a_gpu_that_has_it(monkeypatch, capability, refused):
    """Compute capability 8.0 and later; older GPUs would emulate it, slower than fp32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    if refused:
        with pytest.raises(UserError, match="Tesla T4, which has no bf16"):
            refuse(PrecisionSpec(params="bf16"), GPU)
    else:
        refuse(PrecisionSpec(params="bf16"), GPU)


def test_a_scaled_loss_gives_scaled_gradients():
    """The gradient divided by the loss scale is the gradient of the loss."""
    precision = fp16(initial=2.0**10)
    x = torch.tensor(3.0, requires_grad=True)
    precision.scale(x * x).backward()
    assert x.grad.item() / precision.loss_scale == 6.0


def test_scale_halves_on_overflow_and_doubles_after_a_window():
    """The rule as a table: an overflow also restarts the count."""
    precision = fp16(initial=1024, window=3)
    scales = []
    for overflow in (False, False, True, False, False, False, False, False, False, True, True):
        precision.update(overflow=overflow)
        scales.append(precision.loss_scale)
    assert scales == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 1024, 512]


def test_below_the_floor_the_run_stops():
    """The scale reaches the floor; the next overflow ends the run with a remedy, and changes nothing."""
    precision = fp16(initial=4, floor=2)
    precision.update(overflow=True)
    assert precision.loss_scale == 2
    with pytest.raises(TrainingStopped, match=r"overflows at loss scale 2.*floor 2") as caught:
        precision.update(overflow=True)
    assert "lr" in caught.value.hint
    assert precision.loss_scale == 2


def test_initial_below_floor_is_refused():
    """A scale that starts below the floor is an error in the spec."""
    with pytest.raises(UserError, match="initial: 1 is below floor 2"):
        fp16(initial=1, floor=2)


def test_an_overflow_without_a_scale_is_a_bug():
    """In fp32 and bf16 the step raises NonFinite and never calls this."""
    with pytest.raises(AssertionError):
        Precision(PrecisionSpec(params="bf16"), CPU).update(overflow=True)


def test_state_survives_json_and_continues_alike():
    """A resumed scale doubles at the same step as without the interruption."""
    a = fp16(initial=256, window=5)
    for overflow in (True, False, False, False):
        a.update(overflow=overflow)
    b = fp16(initial=256, window=5)
    b.load(json.loads(json.dumps(a.state())))
    for _ in range(6):
        a.update(overflow=False)
        b.update(overflow=False)
        assert b.state() == a.state()
    assert b.loss_scale == 256


def test_state_of_another_format():
    """Without a scale there is no state; loading None, or a state that is not needed, changes nothing."""
    plain, scaled = Precision(PrecisionSpec(), CPU), fp16(initial=64)
    assert plain.state() == {}
    plain.load(scaled.state())
    scaled.load(plain.state())
    assert (plain.loss_scale, scaled.loss_scale) == (1.0, 64)
