"""Makes the inputs of jobs/qwen_finetune.yaml, offline: a tiny Qwen3 of random weights with its tokenizer, and conversations.

    python jobs/make_qwen.py [FOLDER]          default: build/qwen

The conversations ask what functions of Python's standard library do; the answers are the first lines of their docstrings.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from raydist.data.chat_template import BUILT_IN
from raydist.spec import ModelSpec
from raydist.spec.huggingface import format_of

MODEL = ModelSpec(name="qwen", layers=3, width=64, heads=4, kv_heads=2, hidden=128, context=256, qk_norm=True)
VOCABULARY, TALKS = 512, 600
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def talks() -> Iterator[list[dict[str, str]]]:
    """A question and an answer for each documented function of the library's modules, in the order of their names."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                question = f"What does {path.stem}.{node.name} do?"
                yield [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": text.strip().splitlines()[0]},
                ]


def tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE with Qwen's special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(texts, trainer)
    return made


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """Random weights by their names in files."""
    format, draw = format_of(MODEL.name), np.random.default_rng(17)
    assert format is not None
    made: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in format.shapes(MODEL, VOCABULARY).items():
        for piece in format.pieces(name, shape):
            std = 0.15 if name.startswith("embedding") else shape[-1] ** -0.5
            values = np.ones(shape) if len(shape) == 1 else draw.normal(scale=std, size=shape)
            made[piece.name] = values.astype(np.float32)
    return made


def main(folder: Path) -> None:
    """Writes base/ and talks.jsonl into the folder."""
    base, rows = folder / "base", list(talks())[:TALKS]
    base.mkdir(parents=True, exist_ok=True)
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    format = format_of(MODEL.name)
    assert format is not None
    config = {"architectures": ["Qwen3ForCausalLM"], **format.config(MODEL), "vocab_size": VOCABULARY}
    (base / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights(), base / "model.safetensors", {"format": "pt"})
    tokenizer([message["content"] for row in rows for message in row]).save(str(base / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (base / "chat_template.jinja").write_text(BUILT_IN["chatml"])
    print(f"{base}: a Qwen3 of random weights; {folder / 'talks.jsonl'}: {len(rows)} conversations")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/qwen"))
