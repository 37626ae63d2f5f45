"""Models as users write them: weights from files, buffers, tied weights, transformers; and models with mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raydist.spec import ModelSpec


class Layer(nn.Module):
    """A linear layer on the mean of the tokens so far."""

    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD -> BTD."""
        mean_BTD = x_BTD.cumsum(1) / torch.arange(1, x_BTD.shape[1] + 1).view(1, -1, 1)
        out: Tensor = x_BTD + torch.tanh(self.linear(mean_BTD)) * self.scale
        return out


class Own(nn.Module):
    """Embedding, layers, head; the head is tied to the embedding. Each layer has a persistent buffer, the model a non-persistent
    one."""

    shift: Tensor

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, spec.width)
        self.layers = nn.ModuleList(Layer(spec.width) for _ in range(spec.layers))
        self.head = nn.Linear(spec.width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-1, 1, spec.width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens_BT -> logits_BTV."""
        x_BTD = self.embedding(tokens) + self.shift
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        out: Tensor = self.head(x_BTD)
        return out


def loaded(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """Reads weights and buffers from the file `weights`."""
    model = Own(spec, vocab_size)
    model.load_state_dict(torch.load(spec.options["weights"], weights_only=True))
    return model


class Rows(nn.Module):
    """Adds a linear layer of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """x_BTD -> BTD."""
        out: Tensor = x_BTD + self.linear(x_BTD)
        return out


def row(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """An nn.Sequential of an embedding, `layers` blocks and a head: a pipeline cuts between any two of them."""
    blocks = [Rows(spec.width) for _ in range(spec.layers)]
    return nn.Sequential(nn.Embedding(vocab_size, spec.width), *blocks, nn.Linear(spec.width, vocab_size))


def in_few_bits(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """bf16 weights, as most published checkpoints have; each layer's matrix is a view of its transpose."""
    model = loaded(spec, vocab_size).bfloat16()
    assert isinstance(model, Own)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.linear.weight = nn.Parameter(layer.linear.weight.detach().t().contiguous().t())
        layer.scale, layer.linear.bias.data = layer.scale.float(), layer.linear.bias.detach()
    model.shift = model.shift.float()
    return model


class Pretrained(nn.Module):
    """A model of `transformers` that gives logits."""

    def __init__(self, path: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.inner = AutoModelForCausalLM.from_pretrained(path)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens_BT -> logits_BTV."""
        logits: Tensor = self.inner(tokens, use_cache=False).logits
        return logits


def pretrained(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """Loads the folder `path`, written by `save_pretrained`."""
    return Pretrained(spec.options["path"])


def save_pretrained(path: str, vocab_size: int, **config: Any) -> None:
    """A tiny Llama, its head tied to its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaConfig(vocab_size=vocab_size, **sizes, max_position_embeddings=32, tie_word_embeddings=True, **config)
    LlamaForCausalLM(made).save_pretrained(path)


def unseeded(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """A layer's weights and a buffer are drawn from an unseeded generator."""
    model, own = Own(spec, vocab_size), torch.Generator()
    own.seed()
    layer = model.layers[1]
    assert isinstance(layer, Layer)
    layer.linear.weight.data.normal_(generator=own)
    layer.scale.normal_(generator=own)
    return model


class AcrossBlocks(Own):
    """The second layer's matrix is tied to the first one's; `mix`, outside the layers, is tied to the last layer's."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__(spec, vocab_size)
        first, second = self.layers[0], self.layers[1]
        assert isinstance(first, Layer)
        assert isinstance(second, Layer)
        second.linear.weight = first.linear.weight
        self.mix = nn.Linear(spec.width, spec.width, bias=False)
        last = self.layers[-1]
        assert isinstance(last, Layer)
        self.mix.weight = last.linear.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens_BT -> logits_BTV."""
        x_BTD = self.mix(self.embedding(tokens)) + self.shift
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return F.linear(x_BTD, self.embedding.weight)


def empty(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """Has meta parameters, and does not declare that init_module fills them."""
    with torch.device("meta"):
        return Own(spec, vocab_size)


def says_too_much(spec: ModelSpec, vocab_size: int) -> nn.Module:
    """Declares takes_meta, but has no init_module."""
    return Own(spec, vocab_size)


says_too_much.takes_meta = True  # type: ignore[attr-defined]


def no_module(spec: ModelSpec, vocab_size: int) -> dict[str, Any]:
    """Returns a state_dict instead of a model."""
    return {}


class Drawn(Own):
    """Initializes its own weights block by block; the model is named by its class."""

    takes_meta = True

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__(spec, vocab_size)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.scale = torch.ones(spec.width, device="cpu")
        self.shift = torch.linspace(-1, 1, spec.width, device="cpu")

    def init_module(self, name: str, module: nn.Module) -> None:
        """See the models' contract."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        elif isinstance(module, nn.Linear) and name != "head":
            nn.init.normal_(module.weight, std=0.2)
            nn.init.zeros_(module.bias)


class Halved(nn.Module):
    """Has its layers in a part of the name that DDP's wrapper gives to a model."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.module = Own(spec, vocab_size)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(tokens_BT) / 2
        return out
