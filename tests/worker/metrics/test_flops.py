"""FLOPs per token, and the fraction of the peak."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raydist import registry
from raydist.spec import ModelSpec
from raydist.worker.metrics.flops import GPUS, attention_flops, flops_per_token, mfu, peak_flops


def test_formula():
    """6 N + 6 L H (d_qk + d_v) T, computed by hand for GPT-2 small without its embeddings."""
    assert 12 * attention_flops(heads=12, qk=64, v=64, tokens=1024) == 113_246_208


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_gpt_agrees_with_torchs_counter(tie, kv_heads):
    """A real forward pass, with torch's FLOP counter, is a third of the formula.

    The formula counts norm gains as weights, which is 0.3% here. torch cannot count the CPU's fused attention: hence MATH.
    """
    spec = ModelSpec(layers=2, width=64, heads=4, context=32, kv_heads=kv_heads, tie_embeddings=tie)
    model = registry.load("model", "gpt")(spec, 128)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 32, dtype=torch.long))
    assert flops_per_token(model, 32) == pytest.approx(3 * counter.get_total_flops() / (2 * 32), rel=0.005)


def test_embedding_counts_only_where_it_is_the_head():
    """Tying changes the number of parameters and not the FLOPs: both count the head once, and no lookup."""
    build, spec = registry.load("model", "gpt"), ModelSpec(layers=1, width=32, heads=2, context=16)
    tied = flops_per_token(build(spec, 64), 16)
    assert tied == flops_per_token(build(spec.model_copy(update={"tie_embeddings": False}), 64), 16)


def test_a_model_without_its_own_count():
    """6 for each parameter outside embeddings; a tied embedding counts: here layers and head of the mlp."""
    model = registry.load("model", "mlp")(ModelSpec(name="mlp", layers=1, width=8, hidden=16), 32)
    layer, head = 2 * 8 + (8 * 16 + 16) + (16 * 8 + 8), 8 * 32 + 32
    assert flops_per_token(model, 16) == 6 * (layer + head)
    model.head.weight = model.embedding.weight
    assert flops_per_token(model, 16) == 6 * (layer + head)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200 NVL", 836e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090", None),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("cpu", None),
        ("", None),
    ],
)
def test_peak_by_device_name(name, peak):
    """Names as the driver reports them; unknown names and slices of a GPU have no peak."""
    assert peak_flops(name) == peak


def test_narrower_names_come_first():
    """No entry is hidden behind an earlier one that also matches."""
    names = list(GPUS)
    for i, name in enumerate(names):
        assert not any(set(earlier.split()) <= set(name.split()) for earlier in names[:i]), name


def test_mfu():
    """The job's FLOP/s over the peak of all its GPUs; None if the peak is unknown."""
    assert mfu(1e6, 989e6 / 2, "NVIDIA H200", 2) == pytest.approx(0.25)
    assert mfu(1e6, 1e9, "cpu", 2) is None
