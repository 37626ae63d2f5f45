"""`raydist sample --chat`: a model that was trained on conversations answers by their template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

import raydist
from raydist.cli import sample
from raydist.data.chat_template import chat_format
from raydist.data.dataset import TokenDataset
from raydist.data.prepare import prepare
from raydist.errors import UsageError, UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import JobSpec, dump
from raydist.worker.attempt import Job
from raydist.worker.loop import train
from raydist.worker.sampling import Chat
from tests.training import alone

ANSWERS = {"hello": "hello yourself", "what is a rank?": "one process", "count": "1 2 3"}
app = typer.Typer()
app.command()(sample.sample)
app.command("other")(lambda: None)
runner = CliRunner()


def trained(folder: Path, tokenizer: str, **data: Any) -> RunDir:
    """A run of a small model that has learned the answers by heart."""
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS.items()]
    rows = [{"messages": turn} for turn in turns] + [{"messages": [*turns[0], *turns[2]]}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = chat_format("chatml", tokenizer, "completions")
    prepare([str(folder / "rows.jsonl")], str(folder / "tokens"), tokenizer, chat=chat, eval_fraction=0.0)
    spec = JobSpec.model_validate(
        {
            "model": {"layers": 2, "width": 64, "heads": 2, "context": 512},
            "data": {"path": str(folder / "tokens"), "pack": True},
            "train": {"steps": 100, "global_batch": 1, "micro_batch": 1},
            "optim": {"lr": 5e-3},
            "eval": {"every": None},
            "checkpoint": {"every": None, "asynchronous": False},
        }
    )
    run = RunDir(str(folder / "run"))
    run.storage.write(SPEC, dump(spec).encode())
    train(Job(spec, run, str(folder / "tokens"), 1, None), alone(), None)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """With a tokenizer that has the template's special tokens."""
    folder = tmp_path_factory.mktemp("chat")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    inner.train_from_iterator([], trainer)
    inner.save(str(folder / "tokenizer.json"))
    return trained(folder, str(folder / "tokenizer.json"))


def ask(run: RunDir, *options: str, typed: str = "") -> list[str]:
    """The lines that the command prints."""
    result = runner.invoke(app, ["sample", run.uri, "--temperature", "0", *options], input=typed)
    if result.exception is not None:
        raise result.exception
    return result.stdout.splitlines()


def test_messages_are_answered(run: RunDir) -> None:
    """One message, several in turn, and those of standard input; an answer ends where the assistant's turn does."""
    assert ask(run, "--chat", "--message", "what is a rank?") == ["one process"]
    assert ask(run, "--chat", "--message", "hello", "--message", "count") == ["hello yourself", "1 2 3"]
    assert ask(run, "--chat", typed="hello\n\ncount\n") == ["hello yourself", "1 2 3"]


def test_from_python(run: RunDir) -> None:
    """The same answers, and the same text."""
    chat = raydist.Run(run).chat(temperature=0.0)
    for text, answer in (("hello", "hello yourself"), ("count", "1 2 3")):
        chat.add("user", text)
        assert chat.answer() == answer
    text = raydist.Run(run).sample("he", tokens=5, temperature=0.0)
    assert text.splitlines() == ask(run, "--prompt", "he", "--tokens", "5")
    assert len(text) > 2


def test_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    """The text of the template ends an answer."""
    assert ask(trained(tmp_path, "bytes"), "--chat", "--message", "hello") == ["hello yourself"]


class Scripted:
    """A model that writes the same text after every prompt."""

    def generate(self, tokens_BT: torch.Tensor, max_new: int, end: int) -> torch.Tensor:
        written = b"hello yourself\n\nuser:\nwhat is a rank?"
        return torch.cat([tokens_BT, torch.tensor([list(written)])], dim=1)


def test_what_the_user_would_say_is_no_answer(tmp_path: Path) -> None:
    """A model that goes on with the user's next message, where the template has no token that ends a turn, is cut there."""
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello yourself"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}))
    plain = chat_format("plain", "bytes", "completions")
    prepare([str(tmp_path / "rows.jsonl")], str(tmp_path / "tokens"), chat=plain, eval_fraction=0.0)
    chat = Chat(Scripted(), TokenDataset(tmp_path / "tokens"), 512, 100, {})
    chat.add("user", "hello")
    assert chat.answer() == "hello yourself"


def test_what_cannot_be_asked(run: RunDir, tmp_path: Path) -> None:
    """Each is one error of the user's."""
    with pytest.raises(UserError, match=r"message.content: spells the special token <\|im_end\|>"):
        ask(run, "--chat", "--message", "hello<|im_end|>")
    with pytest.raises(UserError, match=r"the conversation has \d+ tokens, and model.context is 512"):
        ask(run, "--chat", "--message", "hello " * 200)
    with pytest.raises(UsageError, match="--message and --system: need --chat"):
        ask(run, "--message", "hello")
    (tmp_path / "a.txt").write_text("text\n" * 50)
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokens"), eval_fraction=0.0)
    spec = JobSpec.model_validate(
        {
            "model": {"layers": 1, "width": 8, "heads": 1, "context": 8},
            "data": {"path": str(tmp_path / "tokens")},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
            "eval": {"every": None},
        }
    )
    plain = RunDir(str(tmp_path / "run"))
    plain.storage.write(SPEC, dump(spec).encode())
    train(Job(spec, plain, str(tmp_path / "tokens"), 1, None), alone(), None)
    with pytest.raises(UserError, match="has no chat template"):
        ask(plain, "--chat", "--message", "hello")
