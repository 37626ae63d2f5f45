"""Conversations: their text and tokens are those of transformers, only what the assistant says counts, and each stays apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from typer.testing import CliRunner

from raydist import registry
from raydist.cli import data as command
from raydist.data import sources
from raydist.data.batches import MASKED, MicroBatch
from raydist.data.chat_template import BUILT_IN, chat_format
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.prepare import prepare
from raydist.data.sequences import Sequences
from raydist.errors import DataError, SpecError
from raydist.spec import ModelSpec, parse
from raydist.worker.evaluate import batches_of, evaluate, job_of
from raydist.worker.loss import build as build_loss
from raydist.worker.loss.cross_entropy import loss_sum

TALKS: list[list[dict[str, str]]] = [
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is a shard?"},
        {"role": "assistant", "content": "a part of a tensor"},
        {"role": "user", "content": "größe?"},
        {"role": "assistant", "content": " one row λ"},
    ],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello yourself"}],
    [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1 2 3"}],
]
PLAIN_CHATML = (  # without `generation`, as most models have it
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKS = (  # as Qwen3: the last answer has thoughts, earlier ones do not
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ENDS_TURNS = (  # each answer ends with the token that ends a document, too
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as `transformers` saves it, with the special tokens of Qwen and a template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator([m["content"] for talk in TALKS for m in talk] * 3, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=special
    )
    made.chat_template = PLAIN_CHATML
    place = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(place)
    return place


def lines(path: Path, rows: list[Any]) -> str:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made(
    tmp_path: Path, rows: list[Any], tokenizer: str = "bytes", template: str | None = "chatml", **more: Any
) -> TokenDataset:
    """The dataset of these rows, all of them in the train split."""
    tmp_path.mkdir(exist_ok=True)
    source = lines(tmp_path / "rows.jsonl", rows)
    chat = chat_format(template, tokenizer, more.pop("loss_on", "completions"))
    prepare([source], str(tmp_path / "tokens"), tokenizer, chat=chat, eval_fraction=0.0, **more)
    return TokenDataset(tmp_path / "tokens")


def documents(dataset: TokenDataset, part: str = "train") -> list[tuple[list[int], list[bool]]]:
    """Of each document the tokens, and whether each counts."""
    split = dataset.split(part)
    assert split.counts is not None
    found = []
    for number in range(getattr(dataset.index, part).documents):
        start, stop = split.document(number)
        assert split.are_ends(np.array([start]), stop - start)[0].tolist() == [False] * (stop - start - 1) + [True]
        found.append((split.read(start, stop).tolist(), (split.counts.read(start, stop) != 0).tolist()))
    return found


def counted(dataset: TokenDataset) -> list[list[str]]:
    """The stretches of each document that count, as text."""
    found = []
    for ids, counts in documents(dataset):
        edges = np.flatnonzero(np.diff([0, *counts, 0]))
        found.append([dataset.tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)])
    return found


def test_a_tokenizer_on_an_object_store(folder: Path, tmp_path: Path, s3: Any) -> None:
    """It and the template beside it make the same dataset as on a disk, which has no secret of the URI; one that is missing is an
    error without."""
    place, mark, options = s3.uploaded(folder, "tokenizer").partition("?")
    names = f"{place}/tokenizer.json{mark}{options}", str(folder / "tokenizer.json")
    there, here = (made(tmp_path / str(i), [{"messages": TALKS[0]}], name, None) for i, name in enumerate(names))
    assert there.index.tokenizer.hash == here.index.tokenizer.hash
    assert counted(there) == counted(here)
    assert there.index.tokenizer.name.startswith("s3://bucket/tokenizer/tokenizer.json?")
    with pytest.raises(DataError, match=r"tokenizer s3://bucket/tokenizer/none\.json.*: .*No such file") as caught:
        made(tmp_path / "2", [GOOD], names[0].replace("tokenizer.json", "none.json"))
    assert "check the bucket's name" in caught.value.hint


@pytest.mark.parametrize("template", [None, "chatml"])
def test_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, template: str | None) -> None:
    """The ids are those of `apply_chat_template`, and so is the mask where a template says what the assistant wrote."""
    dataset = made(tmp_path, [{"messages": talk} for talk in TALKS], str(folder / "tokenizer.json"), template)
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    text = BUILT_IN["chatml"] if template else PLAIN_CHATML
    for talk, (ids, counts) in zip(TALKS, documents(dataset), strict=True):
        right = peer.apply_chat_template(
            talk, chat_template=text, tokenize=True, return_dict=True, return_assistant_tokens_mask=template is not None
        )
        assert ids == [*right["input_ids"], dataset.end]
        if template:
            assert counts[:-1] == [bool(m) for m in right["assistant_masks"]]


EXPECTED: dict[str, list[str]] = {
    "chatml": ["a part of a tensor<|im_end|>\n", " one row λ<|im_end|>\n"],
    PLAIN_CHATML: ["a part of a tensor<|im_end|>\n", " one row λ<|im_end|>\n"],
    THINKS: ["a part of a tensor<|im_end|>\n", "<think>\n\n</think>\n\n one row λ<|im_end|>\n"],
    "plain": ["a part of a tensor\n\n", " one row λ\n\n"],
}


@pytest.mark.parametrize("template", EXPECTED)
@pytest.mark.parametrize("own", [False, True])
def test_what_the_assistant_says_counts(folder: Path, tmp_path: Path, template: str, own: bool) -> None:
    """Of a turn what the assistant writes, its end included, whatever the tokenizer; and the end of the last one."""
    (tmp_path / "a.jinja").write_text(template)
    name = template if template in BUILT_IN else str(tmp_path / "a.jinja")
    dataset = made(tmp_path, [{"messages": TALKS[0]}], str(folder / "tokenizer.json") if own else "bytes", name)
    assert counted(dataset) == [EXPECTED[template]]
    assert documents(dataset)[0][1][-1]


def test_prompts_and_completions(folder: Path, tmp_path: Path) -> None:
    """Of two texts the completion and the end count; of messages the turns of the completion alone."""
    tokenizer = str(folder / "tokenizer.json")
    pairs: list[Any] = [{"prompt": "2+2=", "completion": "4 <|im_end|>"}]
    pairs += [{"prompt": TALKS[0][:4], "completion": TALKS[0][4:]}]
    dataset = made(tmp_path, pairs, tokenizer)
    (ids, counts), _ = documents(dataset)
    assert dataset.tokenizer.decode(ids) == "2+2=4 <|im_end|>"
    assert counts[-1]
    assert ids.count(2) == 0, "text that spells a special token is text"
    assert counted(dataset) == [["4 <|im_end|>"], [" one row λ<|im_end|>\n"]]
    (tmp_path / "all").mkdir()
    assert all(documents(made(tmp_path / "all", pairs[:1], loss_on="all"))[0][1])


def test_masked_tokens_have_no_gradient(tmp_path: Path) -> None:
    """The gradient of the logits is exactly zero where the next token is not the assistant's, and only there."""
    dataset = made(tmp_path, [{"messages": talk} for talk in TALKS])
    tokens, targets, packed = Windows(dataset.split("train"), 48).batch(np.arange(3), pack=True)
    following, flags = (
        np.concatenate([d[0] for d in documents(dataset)]),
        np.concatenate([d[1] for d in documents(dataset)]),
    )
    right = np.where(flags, following, MASKED)[1 : 3 * 48 + 1].reshape(3, 48)
    assert (targets == right).all()
    logits = torch.randn(3, 48, 257, generator=torch.Generator().manual_seed(0), requires_grad=True)

    class Given(nn.Module):
        def forward(self, tokens_BT: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            return logits

    loss_sum(Given(), MicroBatch(torch.as_tensor(tokens), torch.as_tensor(targets), torch.as_tensor(packed))).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert ((logits.grad != 0).any(-1).numpy() == (targets != MASKED)).all()
    assert 0 < (targets != MASKED).sum() < targets.size


def test_packing_keeps_conversations_apart(folder: Path, tmp_path: Path) -> None:
    """In a packed window each conversation has the loss that it has alone, also where its turns end like a document."""
    (tmp_path / "ends.jinja").write_text(ENDS_TURNS.replace("eos_token", "'<|endoftext|>'"))
    rows = [{"messages": talk[-4:]} for talk in TALKS]
    dataset = made(tmp_path, rows, str(folder / "tokenizer.json"), str(tmp_path / "ends.jinja"))
    every = [ids for ids, _ in documents(dataset)]
    assert every[0].count(dataset.end) == 2, "the end stands inside of the conversation, and is not repeated after it"
    spec = ModelSpec(layers=2, width=16, heads=2, context=sum(map(len, every)) - 1)
    torch.manual_seed(0)
    model = registry.load("model", "gpt")(spec, dataset.vocab_size)

    def loss(*arrays: Any) -> torch.Tensor:
        return loss_sum(model, MicroBatch(*(torch.as_tensor(a) for a in arrays))).detach()

    packed = Windows(dataset.split("train"), spec.context).batch(np.array([0]), pack=True)
    assert packed[2] is not None
    assert packed[2].max() == len(rows) - 1
    alone = torch.zeros(())
    for ids, counts in documents(dataset):
        targets = np.where(counts[1:], ids[1:], MASKED)
        alone += loss(np.array([ids[:-1]]), targets[None], np.zeros((1, len(ids) - 1), np.int32))
    assert loss(*packed).item() == pytest.approx(alone.item(), rel=1e-5)  # other lengths: other kernels
    assert loss(*packed[:2], np.zeros_like(packed[2])).item() != pytest.approx(alone.item(), rel=1e-4)


def test_evaluations_keep_conversations_apart(tmp_path: Path) -> None:
    """The held-out loss is that of each conversation alone, over what the assistant says: of a run with `data.batching`, and of
    `raydist evaluate`, which knows the dataset only."""
    rows = [{"messages": [{**m, "content": f"{m['content']} {i}"} for m in TALKS[i % 3]]} for i in range(30)]
    prepare([lines(tmp_path / "rows.jsonl", rows)], str(tmp_path / "tokens"), chat=chat_format("chatml", "bytes", "completions"),
            eval_fraction=0.5)  # fmt: skip
    dataset = TokenDataset(tmp_path / "tokens")
    spec = ModelSpec(layers=2, width=16, heads=2, context=400)
    torch.manual_seed(0)
    model = registry.load("model", "gpt")(spec, dataset.vocab_size)
    job = parse({"model": spec.model_dump(), "data": {"path": str(tmp_path / "tokens"), "batching": {"max_tokens": 900}},
                 "train": {"steps": 1, "global_batch": 5}, "eval": {"batches": 10}})  # fmt: skip
    of_run, of_command = (
        evaluate(model, batches_of(each, dataset), build_loss(job)) for each in (job, job_of(spec, dataset, 10, 4))
    )
    assert of_run.tokens == of_command.tokens == sum(sum(counts[1:]) for _, counts in documents(dataset, "eval"))
    alone = 0.0
    for ids, counts in documents(dataset, "eval"):
        targets = np.where(counts[1:], ids[1:], MASKED)
        alone += loss_sum(model, MicroBatch(torch.tensor([ids[:-1]]), torch.as_tensor(targets)[None])).item()
    assert of_run.loss == pytest.approx(alone / of_run.tokens, rel=1e-5)
    assert of_command.loss == pytest.approx(of_run.loss, rel=1e-5)


def test_documents_of_like_length(tmp_path: Path) -> None:
    """With data.batching a row is a conversation, of which only what the assistant says is a target."""
    dataset = made(tmp_path, [{"messages": talk} for talk in TALKS])
    tokens, targets, _ = Sequences(dataset.split("train"), 512).batch(np.array([1]))
    ids, counts = documents(dataset)[1]
    assert tokens[0, : len(ids) - 1].tolist() == ids[:-1]
    assert targets[0, : len(ids) - 1].tolist() == np.where(counts[1:], ids[1:], MASKED).tolist()
    assert (targets[0, len(ids) - 1 :] == MASKED).all()


def test_parquet_and_lines_make_the_same_dataset(tmp_path: Path) -> None:
    """Also in several blocks and shards; nulls that Parquet fills in are no fields."""
    rows = [{"messages": talk} for talk in TALKS * 20]
    pq.write_table(
        pa.Table.from_pylist([*rows, {"messages": None}]).slice(0, len(rows)),
        tmp_path / "rows.parquet",
        row_group_size=7,
    )
    chat = chat_format("chatml", "bytes", "completions")
    common: dict[str, Any] = {"chat": chat, "eval_fraction": 0.0, "shard_tokens": 500}
    one = prepare([lines(tmp_path / "rows.jsonl", rows)], str(tmp_path / "one"), **common)
    two = prepare([str(tmp_path / "rows.parquet")], str(tmp_path / "two"), **common)
    assert one.fingerprint == two.fingerprint
    assert len(one.train.shards) > 5
    split = TokenDataset(tmp_path / "one").split("train")
    assert split.counts is not None
    assert len(split.counts) == len(split)
    start, stop = split.document(31)
    assert TokenDataset(tmp_path / "one").tokenizer.decode(split.read(start, stop)) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhello yourself<|im_end|>\n"
    )


GOOD = {"messages": TALKS[1]}


def talk(**message: Any) -> dict[str, Any]:
    """A conversation whose second message is this one."""
    return {"messages": [TALKS[1][0], message]}


BAD: dict[str, tuple[Any, str]] = {
    "no role": (talk(content="x"), "messages[1]: has no role"),
    "unknown role": (talk(role="asistant", content="x"), "messages[1].role: unknown 'asistant'"),
    "no content": (talk(role="assistant"), "messages[1]: has no content"),
    "empty content": (talk(role="assistant", content="  "), "messages[1].content: is empty"),
    "parts": (talk(role="assistant", content=[{"text": "x"}]), "messages[1].content: has type list"),
    "no assistant": ({"messages": TALKS[1][:1]}, "messages: none is of the assistant"),
    "no messages": ({"messages": []}, "messages: is empty"),
    "a message that is none": ({"messages": ["x"]}, "messages[0]: has type str"),
    "special": (talk(role="assistant", content="a<|im_end|>b"), "spells the special token <|im_end|>"),
    "special in a call": (
        talk(role="assistant", tool_calls=[{"name": "f", "arguments": {"x": "<|im_end|>"}}]),
        "].tool_calls[0].arguments.x: spells the special token <|im_end|>",
    ),
    "mark in a call": (
        talk(role="assistant", tool_calls=[{"name": "\ue001"}]),
        "].tool_calls[0].name: has the private character",
    ),
    "mixed": ({"prompt": "a", "completion": "b"}, "has prompt and completion, and "),
    "both": ({**GOOD, "prompt": "a", "completion": "b"}, "has messages, and prompt and completion too"),
    "neither": ({"text": "a", "messages": None}, "no conversation: it has text, messages (null)"),
    "surrogate": (talk(role="assistant", content="\ud800"), "messages[1].content: surrogates not allowed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_named(folder: Path, tmp_path: Path, case: str) -> None:
    """One error with file, line and field, and exit code 2; no dataset is left."""
    row, says = BAD[case]
    with pytest.raises(DataError) as caught:
        made(tmp_path, [GOOD, GOOD, row], str(folder / "tokenizer.json"))
    assert f"{tmp_path}/rows.jsonl: line 3: " in caught.value.message
    assert says in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert not (tmp_path / "tokens/index.json").exists()


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ({"prompt": "a", "completion": " "}, "line 1: completion: is empty"),
        ({"prompt": "a", "completion": []}, "line 1: prompt has type str, completion list"),
        ({"prompt": TALKS[1], "completion": TALKS[1]}, "line 1: completion[0].role: 'user' is not the assistant"),
    ],
)
def test_bad_pairs_are_named(tmp_path: Path, pair: Any, says: str) -> None:
    """The same for prompt and completion."""
    with pytest.raises(DataError, match="rows.jsonl") as caught:
        made(tmp_path, [pair])
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}", "the chat template is not valid: line 1: Unexpected end of template"),
        ("{{ raise_exception('roles must alternate') }}", "line 1: the chat template fails: roles must alternate"),
        ("{{ messages[0].a.b }}", "line 1: the chat template fails: 'dict object' has no attribute 'a'"),
        ("{{ messages.append(1) }}", "line 1: the chat template fails"),
        ("{{ ''.__class__.__mro__ }}", "line 1: the chat template fails: access to attribute '__class__'"),
        (
            "{{ messages | length }}{% if add_generation_prompt %}x{% endif %}",
            "messages[1]: the chat template writes a turn in ",
        ),
    ],
)
def test_bad_templates_are_named(tmp_path: Path, template: str, says: str) -> None:
    """A template can fail in its text, for a conversation, in the sandbox, or in a way that hides the assistant's part."""
    (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(DataError) as caught:
        made(tmp_path, [GOOD], template=str(tmp_path / "bad.jinja"))
    assert says in caught.value.message


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """No template, an unknown one, text files, and conversations that are read as text."""
    with pytest.raises(DataError, match="messages need a chat template, and the tokenizer has none") as caught:
        made(tmp_path, [GOOD], template=None)
    assert "chatml, llama3, plain" in caught.value.hint
    with pytest.raises(DataError, match="chat template 'chatlm'") as caught:
        chat_format("chatlm", "bytes", "completions")
    assert 'did you mean "chatml"?' in caught.value.hint
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="a.txt: is a text file, and data.format is chat"):
        prepare([str(tmp_path / "a.txt")], str(tmp_path / "b"), chat=chat_format("chatml", "bytes", "all"))
    with pytest.raises(DataError, match='no column "text"') as caught:
        prepare([lines(tmp_path / "c.jsonl", [GOOD])], str(tmp_path / "d"))
    assert "data.format: chat" in caught.value.hint
    with pytest.raises(SpecError, match=r"data.loss_on: 'all' has no effect on text"):
        parse({"data": {"source": "a", "loss_on": "all"}, "train": {"steps": 1}})


def test_a_file_of_several_pieces_has_one_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its rows are read in pieces, by several processes; the line is counted from the beginning of the file."""
    monkeypatch.setattr(sources, "_LINES", 300)
    rows = [GOOD] * 9
    assert len(documents(made(tmp_path, rows))) == 9
    with pytest.raises(DataError, match=r"rows.jsonl: line 10: has prompt and completion, and .*line 1 has messages"):
        prepare(
            [lines(tmp_path / "rows.jsonl", [*rows, {"prompt": "a", "completion": "b"}])],
            str(tmp_path / "two"),
            chat=chat_format("chatml", "bytes", "completions"),
            block_bytes=300,
        )


def test_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's gives rows, too."""
    (tmp_path / "talks_here.py").write_text(f"rows = {[GOOD, {'messages': 3}]!r}\ngood = rows[:1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    chat = chat_format("chatml", "bytes", "completions")
    assert prepare(["talks_here:good"], str(tmp_path / "a"), chat=chat).train.documents == 1
    with pytest.raises(DataError, match="source talks_here:rows: document 1: messages: has type int"):
        prepare(["talks_here:rows"], str(tmp_path / "b"), chat=chat)


def test_show_prints_a_conversation(tmp_path: Path) -> None:
    """What counts stands in brackets where the output is no terminal; with --json each piece says whether it counts."""
    source, out = lines(tmp_path / "rows.jsonl", [GOOD]), str(tmp_path / "tokens")
    runner = CliRunner()
    given = ["prepare", source, "--out", out, "--format", "chat", "--chat-template", "chatml"]
    assert runner.invoke(command.app, given).exit_code == 0
    shown = runner.invoke(command.app, ["show", out]).stdout
    assert "loss on    what the assistant says" in shown
    assert "user\nhello<|im_end|>\n<|im_start|>assistant\n[[hello yourself<|im_end|>\n]]" in shown
    facts = json.loads(runner.invoke(command.app, ["show", out, "--json"]).stdout)
    assert [piece["counts"] for piece in facts["document"]] == [False, True]
    wrong = runner.invoke(command.app, ["show", out, "--document", "1"]).exception
    assert "document 1 of train, which has 1" in str(wrong)
    other = runner.invoke(command.app, [*given[:-3], "caht"]).exception
    assert "did you mean" in str(getattr(other, "hint", ""))
