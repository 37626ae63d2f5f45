"""A job file is loaded as a whole, or all its problems are reported at once: file, field, value, remedy."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raydist.cli.schema import job_schema
from raydist.errors import SpecError
from raydist.spec import JobSpec, TrainSpec, dump, load, merge, parse, spec_hash

JOBS = Path(__file__).parents[2] / "jobs"
QUICKSTART = JOBS / "quickstart.yaml"


def problems(*overrides: str) -> list[str]:
    """The problems of the quickstart with these overrides, one line each."""
    with pytest.raises(SpecError) as caught:
        load(QUICKSTART, overrides)
    return caught.value.message.splitlines()


def test_the_issue_s_own_file_runs_as_it_stands() -> None:
    """The fields of the quickstart have their values and types."""
    spec = load(QUICKSTART)
    assert (spec.name, spec.model.layers, spec.train.global_batch, spec.optim.lr) == ("quickstart", 4, 32, 1e-3)
    assert (spec.precision.params, spec.checkpoint.asynchronous, spec.cluster.gpus_per_worker) == ("fp32", True, "auto")


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_job_is_valid_and_names_the_schema(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each YAML in jobs/ fits the schema that its first line names; those with a name load without overrides, once the script that
    they name has made their inputs."""
    text = path.read_text()
    first = text.splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = json.loads((path.parent / first.split("=", 1)[1]).read_text())
    jsonschema.validate(yaml.safe_load(text), schema)
    if "python jobs/make_qwen.py" in text:
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(JOBS / "make_qwen.py"), run_name="make_qwen")["main"](Path("build/qwen"))
    if "name" in yaml.safe_load(text):
        load(path)


def test_the_written_schema_is_today_s() -> None:
    """docs/reference/spec.schema.json is what `raydist schema` prints, written by `make docs`."""
    assert json.loads((JOBS.parent / "docs/reference/spec.schema.json").read_text()) == json.loads(
        json.dumps(job_schema())
    )


def test_every_field_has_its_help() -> None:
    """Every field has a description in the schema, and so in docs/reference/spec.md."""
    schema = job_schema()
    for name, section in {"job": schema, **schema["$defs"]}.items():
        for field, prop in section["properties"].items():
            # If field and section have the same help, Pydantic writes it only at the section.
            assert prop.get("description") or schema["$defs"][prop["$ref"].rsplit("/", 1)[-1]]["description"], (
                f"{name}.{field}"
            )


def test_all_problems_at_once() -> None:
    """Unknown fields, wrong types, unknown names and impossible combinations are reported together, one line each."""
    lines = problems(
        "model.heads=5", "optim.lrr=1", "parallel.strategy=zreo3", "train.micro_batch=5", "optim.name=adam", "lr=3"
    )
    text = "\n".join(lines)
    assert "--set model.heads: model.heads: 5 does not divide width 128; try" in text
    assert '--set optim.lrr: optim.lrr: unknown field; did you mean "lr"?' in text
    assert '--set parallel.strategy: parallel.strategy: unknown "zreo3"' in text
    assert (
        "train.global_batch: 32 is not a whole number of micro-batches of 5; try train.micro_batch 2 or 4 or 8" in text
    )
    assert '--set optim.name: optim.name: unknown "adam"; did you mean "adamw"?' in text
    assert '--set lr: lr: unknown field; did you mean "optim.lr"?' in text
    assert len(lines) == 6


def test_batches_by_tokens_need_no_micro_batch() -> None:
    """With data.batching train.micro_batch, which has a default, is not used, and need not divide the global batch."""
    assert load(QUICKSTART, ["train.global_batch=12", "data.batching.max_tokens=1024"]).train.micro_batch == 8
    assert "12 is not a whole number of micro-batches of 8" in "".join(problems("train.global_batch=12"))


def test_a_wrong_type_does_not_hide_a_combination() -> None:
    """In one section, a value of the wrong type and an impossible combination are both reported."""
    text = "\n".join(problems("train.steps=abc", "train.micro_batch=5"))
    assert "train.steps: 'abc'" in text
    assert "micro-batches of 5" in text
    assert "exactly one" not in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.schedule.warmup=1.5", "1.5 is neither a fraction below 1 nor a whole number of steps"),
        ("optim.schedule.warmup=300", "300.0 is longer than the run of 200 steps"),
        ("cluster.workers=64", "64 is more than the 32 sequences of a global batch"),
        ("train.virtual_ranks=5", "train.virtual_ranks: 5 does not divide train.global_batch: 32; try 2 or 4 or 8"),
        (
            "train.virtual_ranks=8",
            "micro_batch: 8 does not divide the 4 sequences of each of train.virtual_ranks: 8; try 1 or 2 or 4",
        ),
        (
            "train.virtual_ranks=4 & cluster.workers=[1,8]",
            "train.virtual_ranks: 4 is fewer than the 8 workers that the run may have (cluster.workers)",
        ),
        (
            "train.virtual_ranks=2 & parallel={expert: 4} & model.name=mixtral & cluster.workers=4",
            "train.virtual_ranks: 2 is no multiple of the 4 replicas that share experts (parallel.expert: 4); try 4",
        ),
        (
            "train.virtual_ranks=4 & parallel={context: 3, expert: 2} & model={name: mixtral, heads: 3, width: 96, context: 96}"
            " & cluster.workers=6",
            "parallel.expert: 2 does not go with train.virtual_ranks: which replicas share experts depends on their number",
        ),
        (
            "train.virtual_ranks=4 & parallel.strategy=collections:Counter",
            "parallel.strategy: 'collections:Counter' does not sum in the order that train.virtual_ranks needs; take ddp or",
        ),
        (
            "train.virtual_ranks=4 & parallel.strategy=zero2 & optim.name=collections:Counter",
            "optim.name: 'collections:Counter' is not known to update parts of a parameter with the same bits",
        ),
        (
            "train.virtual_ranks=4 & train.compile=true",
            "train.compile: True does not go with train.virtual_ranks: the code of a whole model",
        ),
        (
            "train.virtual_ranks=4 & train.compile=blocks & model.name=mixtral",
            "train.compile: 'blocks' does not go with train.virtual_ranks for a model with experts: each shape is",
        ),
        (
            "comm.options={ratio: 0.1}",
            "comm.options: {'ratio': 0.1} belongs to a compressor, and compress: none has none",
        ),
        ("comm.error_feedback=true", "comm.error_feedback: True belongs to a compressor, and compress: none has none"),
        ("train.virtual_ranks=4 & comm.compress=int8", "comm.compress: 'int8' does not go with train.virtual_ranks"),
        (
            "train.virtual_ranks=4 & precision.reduce=bf16",
            "precision.reduce: 'bf16' does not go with train.virtual_ranks",
        ),
        ("train.virtual_ranks=4 & optim.fused=false", "optim.fused: False does not go with train.virtual_ranks"),
        (
            "data.batching={max_tokens: 64, min: 9, max: 8}",
            "data.batching.min: 9 is above max: 8; set min to at most max",
        ),
        ("data.batching={max_tokens: 8, min: 9}", "max_tokens: 8 has no room for min: 9 sequences of one token; raise"),
        (
            "data.batching={max_tokens: 64, min: 8, longest: 9}",
            "longest: 9 is above the 8 tokens that max_tokens: 64 has for each of min: 8 sequences",
        ),
        (
            "data.batching={max_tokens: 4096, longest: 129}",
            "longest: 129 is above model.context: 128; set it to at most 128",
        ),
        ("data.batching={max_tokens: 256} & data.pack=true", "data.pack: True separates the documents of a row"),
        (
            "data.batching={max_tokens: 256, global_tokens: 100}",
            "global_tokens: 100 is less than the longest sequence has: 128",
        ),
        (
            "data.batching={max_tokens: 256, global_tokens: 512} & optim.scale_lr=sqrt & optim.base_batch=8",
            "optim.scale_lr: 'sqrt' scales by sequences",
        ),
        (
            "data.batching={max_tokens: 6, min: 2} & parallel={tensor: 4} & cluster.workers=4",
            "max_tokens: 6 has 3 tokens for each of min: 2 sequences, fewer than the 4 ranks that share a sequence",
        ),
        (
            "data.batching={max_tokens: 64, longest: 6} & parallel={tensor: 4} & cluster.workers=4",
            "longest: 6 is no multiple of the 4 ranks that share a sequence (parallel.context x tensor); set it to 4",
        ),
        ("data.batching={max_tokens: 64, maxx: 2}", 'data.batching.maxx: unknown field; did you mean "max"?'),
        ("data.batching={min: 4}", "data.batching.max_tokens: is missing; add it"),
        ("model.kv_heads=3", "3 does not divide heads 4"),
        ("model.heads=128", "makes heads of odd size 1"),
        ("optim.scale_lr=sqrt", "is needed by scale_lr: sqrt"),
        ("train.steps=null", "exactly one of them is needed"),
        ("data.source=null", "exactly one of them is needed"),
        ("name=a/b", "name: 'a/b'"),
        ("model.name=no_such_package:build", 'unknown "no_such_package:build": no module "no_such_package" can be'),
        (
            "model.name=tests.ownmodels:nosuch",
            'unknown "tests.ownmodels:nosuch": tests.ownmodels has no "nosuch"; check',
        ),
        (
            "parallel.strategy=raydist.worker.parallel._zero:Nosuch",
            'raydist.worker.parallel._zero has no "Nosuch"; check the name after',
        ),
        ("model.name=zzz", 'unknown "zzz"; there are: deepseek, gpt, '),
        (
            "parallel.tensor=3",
            "model.heads: 4 cannot be shared by parallel.tensor: 3 ranks; try parallel.tensor: 1 or 2 or 4",
        ),
        ("parallel.tensor=4", "parallel.tensor: 4 does not divide the 2 workers"),
        ("parallel.tensor=4 & cluster.workers=[6, 9]", "parallel.tensor: 4 does not divide the 6 workers; try 1 or 3"),
        ("parallel.tensor=2 & cluster.spares=1", "cluster.spares: 1 is no multiple of parallel.tensor: 2"),
        ("parallel.context=4 & cluster.workers=2", "parallel.context: 4 does not divide the 2 workers; try 1 or 2"),
        (
            "parallel.context=3 & cluster.workers=3",
            "model.heads: 4 cannot be shared by parallel.context: 3 ranks; try parallel.context: 1 or 2 or 4",
        ),
        (
            "parallel.context=2 & parallel.tensor=4 & cluster.workers=8",
            "model.heads: 4 cannot be shared by parallel.context: 2 ranks x parallel.tensor: 4; try parallel.context: 1",
        ),
        (
            "parallel.context=2 & model.context=9",
            "parallel.context: 2 does not divide model.context 9; set model.context to a",
        ),
        (
            "parallel.context=2 & model.name=mlp",
            "parallel.context: 2 needs a model that shares sequences; mlp does not declare it",
        ),
        (
            "parallel.context=2 & model.name=deepseek & model.options.num_nextn_predict_layers=1",
            "model.options.num_nextn_predict_layers: 1 reads tokens of the rank after",
        ),
        (
            "parallel.context=2 & parallel.tensor=2",
            "parallel.context: 2 times tensor: 2 does not divide the 2 workers; set cluster.workers to a multiple of 4",
        ),
        ("parallel.pipeline=4", "parallel.pipeline: 4 does not divide the 2 workers"),
        (
            "parallel.tensor=2 & parallel.pipeline=2",
            "parallel.pipeline: 2 times tensor: 2 does not divide the 2 workers; set cluster.workers to a multiple of 4",
        ),
        (
            "parallel.pipeline=2 & parallel.chunks=9",
            "parallel.pipeline: 2 makes 18 stages (pipeline x chunks), and the model has",
        ),
        ("parallel.pipeline=2 & parallel.pipeline_cut=[1,1,1]", "has 3 numbers for 2 stages"),
        ("parallel.pipeline=2 & parallel.pipeline_cut=[1,9]", "has 10 blocks in all, and the model has"),
        ("parallel.chunks=2", "parallel.chunks: 2 needs stages on several ranks"),
        ("parallel.pipeline=2 & train.compile=true", "compiles the whole model"),
        (
            "model={name: llama, width: 4, heads: 2, options: {rope_scaling: {rope_type: dynamic, factor: 2, "
            "original_max_position_embeddings: 8}}}",
            "model.options.rope_scaling.rope_type: 'dynamic' divides by the rotated size of a head less 2, which is 0 here",
        ),
        (
            "model={name: transformers, options: {config: {model_type: bloom}}} & data.pack=true",
            "data.pack: True needs a model that keeps documents apart: bloom of transformers does not, it takes no position_ids",
        ),
        ("parallel.expert=2", "parallel.expert: 2 needs a model with experts, and gpt has none"),
        ("model.name=mixtral & parallel.expert=3", "parallel.expert: 3 does not divide the 8 experts of a layer"),
        (
            "model.name=mixtral & parallel.expert=4",
            "parallel.expert: 4 does not divide the 2 workers of a stage; set cluster.workers to a multiple of 4",
        ),
        (
            "model.name=mixtral & parallel.expert=2 & optim.name=muon",
            "needs an optimizer that works element by element",
        ),
        ("parallel.exchange=alltoall", 'unknown "alltoall"; did you mean "all_to_all"?'),
        ("parallel.tensor=0", "parallel.tensor: 0: input should be greater than or equal to 1"),
        ("parallel.strategy=fsdp", 'unknown "fsdp"; fully sharded is zero3 here, or hsdp, which'),
        ("parallel.strategy=FSDP2", "fully sharded is zero3 here, or hsdp, which"),
        ("parallel.strategy=deepspeed", "DeepSpeed's stages are zero1, zero2 and zero3 here; --deepspeed FILE"),
        ("parallel.strategy=none", "one worker trains the model as it is: leave parallel out"),
        ("observe.exporters=[jsonl,promtheus]", 'unknown "promtheus"; did you mean "prometheus"?'),
        ("observe.exporters=[{name: mlfow}]", 'unknown "mlfow"; did you mean "mlflow"?'),
        ("observe.exporters=[no_such_package:Exporter]", 'unknown "no_such_package:Exporter"'),
        ("observe.exporters=jsonl", "observe.exporters: 'jsonl'"),
        (
            "observe.exporters=[{name: jsonl, path: x}]",
            "observe.exporters[0].path: unknown field; fields here: name, options",
        ),
        ("cluster.gpus_per_worker=-1", "gpus_per_worker: -1: input should be greater than or equal to 0"),
        ("cluster.gpus_per_worker=1.5", "gpus_per_worker: 1.5 is above 1 and not whole, which Ray refuses; round it"),
        ("checkpoint.every=yes", "every: True is no number (YAML reads yes, no, on and off as true and false); give a"),
        ("checkpoint.every=off", "false); give a number or auto or null"),
        ("recovery.snapshot_every=on", "recovery.snapshot_every: True is no number"),
        ("recovery.data_timeout=yes", "recovery.data_timeout: True is no number"),
        ("parallel.bucket_mb=on", "parallel.bucket_mb: True is no number"),
        ("cluster.gpus_per_worker=yes", "false); give a number or auto"),
        ("cluster.workers=[1,true]", "cluster.workers: [1, True] has a value that is no number"),
        ("cluster.resources.custom={a: yes}", "cluster.resources.custom: {'a': True} has a value that is no number"),
        *(
            (
                f"optim.name={name} & parallel.strategy={strategy}",
                f"optim.name: '{name}' works on whole matrices, and parallel.strategy: {strategy} gives each rank some rows",
            )
            for name, strategy in (("muon", "zero1"), ("adafactor", "zero2"), ("muon", "zero3"), ("muon", "hsdp"))
        ),
        (
            "offload.optimizer=cpu & optim.fused=false",
            "optim.fused: False does not go with offload.optimizer: cpu: an offloaded update is always one fused kernel",
        ),
        ("optim.name=adafactor & optim.fused=true", "optim.fused: True does not go with name: adafactor"),
        (
            "comm.topology=ring & comm.ring=[0,2,1]",
            "comm.ring: [0, 2, 1] is an order of 3 ranks, and there are 2 (cluster.workers); name every rank once",
        ),
        (
            "precision=fp16 & precision.loss_scale={initial: 1, floor: 2}",
            "precision.loss_scale.initial: 1.0 is below floor: 2; raise initial or lower floor",
        ),
        ("optim.lr=.nan", "optim.lr"),
        ("optim.lr", "no value"),
        ("optim.lr=[1", "is not YAML"),
    ],
)
def test_one_problem_is_one_line(override: str, expected: str) -> None:
    """Each mistake gives one line with the field and what is wrong."""
    lines = problems(*override.split(" & "))
    assert len(lines) == 1
    assert expected in lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.name=muon", "parallel.strategy=zero2", "cluster.workers=1"),
        ("optim.name=muon", "parallel.pipeline=2", "parallel.strategy=zero1"),
        ("optim.name=muon", "optim.fused=true"),
        ("comm.topology=ring", "comm.ring=[1,0]"),
        ("comm.topology=ring", "comm.ring=[2,0,1]", "cluster.workers=[1,4]"),
        ("precision.loss_scale={initial: 1, floor: 2}",),
        ("optim.fused=yes", "train.compile=on"),
        ("cluster.gpus_per_worker=0.5",),
        ("cluster.gpus_per_worker=2",),
    ],
)
def test_what_the_workers_do_is_not_refused(overrides: tuple[str, ...]) -> None:
    """A strategy that splits nothing, AdamW's kernel in muon, an order of ranks that there may be, no fp16, booleans."""
    load(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a#1.txt", "a#1.txt"),
        ('"my #1 file.txt"', "my #1 file.txt"),
        ("'#1'", "#1"),
        ("s3://a/b?x&y#z", "s3://a/b?x&y#z"),
    ],
)
def test_a_number_sign_that_begins_no_comment(text: str, expected: str) -> None:
    """In quotes, or within a word; also in lists."""
    assert load(QUICKSTART, [f"data.source={text}"]).data.source == expected
    assert load(QUICKSTART, [f"cluster.resources.exclude=[{text}, b]"]).cluster.resources.exclude == [expected, "b"]


def test_values_of_a_dict_are_named_by_their_keys(tmp_path: Path) -> None:
    """Each of them, with its remedy; one that has the name of a field hides no problem of that field."""
    (tmp_path / "job.yaml").write_text(
        "name: a/b\ndata: {source: x}\ntrain: {steps: 1}\ncluster:\n"
        "  env: {OMP_NUM_THREADS: 4, NCCL_IB_DISABLE: 1, DEBUG: on, PATH_: /x, name: 1.5}\n"
        "  resources: {custom: {fast: -1}}\n"
    )
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "job.yaml")
    lines = [line.removeprefix(f"{tmp_path}/job.yaml: ") for line in caught.value.message.splitlines()]
    assert lines[0].startswith("name: 'a/b'")
    assert lines[1:-1] == [
        f"cluster.env.{name}: {value}: is no text for YAML; put it in quotes"
        for name, value in (("OMP_NUM_THREADS", 4), ("NCCL_IB_DISABLE", 1), ("DEBUG", True), ("name", 1.5))
    ]
    assert lines[-1].startswith("cluster.resources.custom.fast: -1: input should be greater than 0")


def test_problems_name_the_file_that_holds_the_value(tmp_path: Path) -> None:
    """A wrong value of a parent file is reported with the parent's name."""
    (tmp_path / "base.yaml").write_text("optim: {lr: fast}\n")
    (tmp_path / "job.yaml").write_text("extends: base.yaml\ndata: {source: x}\ntrain: {steps: 1}\nmodle: {}\n")
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "job.yaml")
    lines = sorted(caught.value.message.splitlines())
    assert lines[0].startswith(f"{tmp_path}/base.yaml: optim.lr: 'fast'")
    assert lines[1] == f'{tmp_path}/job.yaml: modle: unknown field; did you mean "model"?'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "holds list, not fields"),
        ("train: {steps: 1, steps: 2}", "the key 'steps' is given twice"),
        ("extends: job.yaml", "goes round in a circle"),
        ("extends: bsae.yaml", "no such file"),
        ("extends: 3", "is not a file name"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, expected: str) -> None:
    """Invalid YAML, a wrong extends and a cycle are one clear line each."""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError, match=expected):
        load(tmp_path / "job.yaml")


def test_a_missing_file_suggests_its_neighbour() -> None:
    """For a misspelt path a similar file name is suggested."""
    with pytest.raises(SpecError, match=r"did you mean .*quickstart\.yaml"):
        load(JOBS / "quikstart.yaml")


def test_exporters_by_name_or_with_options() -> None:
    """An exporter given by name has no options; a job that names none has TensorBoard."""
    spec = load(JOBS / "quickstart.yaml", ["observe.exporters=[jsonl, {name: mlflow, options: {uri: u}}]"])
    assert [(e.name, e.options) for e in spec.observe.exporters] == [("jsonl", {}), ("mlflow", {"uri": "u"})]
    assert [e.name for e in load(JOBS / "quickstart.yaml").observe.exporters] == ["tensorboard"]


def test_extends_merges_deeply_and_lists_replace(tmp_path: Path) -> None:
    """The nearer file wins, field by field; a list replaces a list; a field that excludes an inherited one replaces it."""
    (tmp_path / "base.yaml").write_text(
        "data: {source: x, pack: true}\ntrain: {steps: 5, seed: 3}\noptim: {betas: [0.5, 0.6], lr: 1e-2}\n"
    )
    (tmp_path / "job.yaml").write_text(
        "extends: base.yaml\ndata: {path: /d}\ntrain: {epochs: 2}\noptim: {betas: [0.1, 0.2]}\n"
    )
    spec = load(tmp_path / "job.yaml")
    assert (spec.data.path, spec.data.source, spec.data.pack) == ("/d", None, True)
    assert (spec.train.epochs, spec.train.steps, spec.train.seed) == (2, None, 3)
    assert (spec.optim.betas, spec.optim.lr) == ((0.1, 0.2), 0.01)


@pytest.mark.parametrize("text", ["3e-4", "0.0003", "3.0e-4", "3E-4"])
def test_floats_as_people_write_them(text: str) -> None:
    """3e-4, which YAML 1.1 reads as a string, is read as a number."""
    assert load(QUICKSTART, [f"optim.lr={text}"]).optim.lr == 3e-4


def test_short_names_of_sections() -> None:
    """precision and schedule may be given by name alone."""
    spec = load(QUICKSTART, ["precision=bf16", "optim.schedule=wsd"])
    assert (spec.precision.params, spec.optim.schedule.name, spec.optim.schedule.warmup) == ("bf16", "wsd", 0.1)


def test_dump_reads_back_to_the_same_spec() -> None:
    """The resolved YAML of a run folder gives an equal spec with an equal hash."""
    spec = load(QUICKSTART, ["optim.lr=3e-4", "model={name: 'tests.ownmodels:Own', options: {a: [1, 2]}}"])
    again = parse(yaml.safe_load(dump(spec)))
    assert again == spec
    assert spec_hash(again) == spec_hash(spec)
    assert spec_hash(spec) != spec_hash(load(QUICKSTART))


def test_numbers_are_what_changes_the_results() -> None:
    """The number of workers does not change the numbers; learning rate, batch and seed do."""
    numbers = load(QUICKSTART).numbers("f")
    assert load(QUICKSTART, ["cluster.workers=1", "checkpoint.every=7", "name=x"]).numbers("f") == numbers
    for override in ("optim.lr=1", "train.global_batch=64", "train.seed=1", "model.width=64", "train.steps=9"):
        assert load(QUICKSTART, [override]).numbers("f") != numbers


def test_no_secret_is_among_the_numbers() -> None:
    """Checkpoints' manifests have the numbers; a run goes on with other credentials."""
    first, second = (
        load(QUICKSTART, [f"data.tokenizer='s3://key:{secret}@bucket/tokenizer.json?region=x'"]).numbers("f")
        for secret in ("hush1", "hush2")
    )
    assert first == second
    assert "hush" not in str(first)


TREES = st.recursive(st.integers(), lambda t: st.dictionaries(st.sampled_from("abc"), t, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from("abc"), TREES), st.dictionaries(st.sampled_from("abc"), TREES))
def test_merge_keeps_the_nearer_value(base: dict, over: dict) -> None:  # type: ignore[type-arg]
    """Every leaf of `over` is in the result, and merging it again changes nothing."""
    merged = merge(base, over)
    assert merge(merged, over) == merged
    for key, value in over.items():
        if not isinstance(value, dict):
            assert merged[key] == value
    assert merged.keys() == base.keys() | over.keys()


def test_spec_is_frozen() -> None:
    """A loaded spec cannot be changed."""
    spec = load(QUICKSTART)
    with pytest.raises(ValueError, match="frozen"):
        spec.train.seed = 5  # type: ignore[misc]
    assert isinstance(spec, JobSpec)


def test_batching_changes_no_hash_but_its_own() -> None:
    """A job without data.batching dumps as before; with it, only what changes the samples is among the numbers of a run."""
    plain = load(JOBS / "quickstart.yaml")
    assert "batching" not in plain.model_dump()["data"]

    def numbers(**fields: Any) -> dict[str, Any]:
        data = {**plain.data.model_dump(), "batching": {"max_tokens": 4096, **fields}}
        return plain.model_validate({**plain.model_dump(), "data": data}).numbers("f")

    same = numbers()
    assert {name: value for name, value in same.items() if "batching" in name} == {
        "data.batching.longest": plain.model.context,
        "data.batching.longer": "split",
        "data.batching.global_tokens": None,
    }
    assert numbers(max_tokens=2048, max=7, multiple=1, lengths=3, longest=plain.model.context) == same
    assert numbers(min=4096 // 8) != same != numbers(longer="cut")


def test_the_largest_pass() -> None:
    """The shape that needs the most memory: of the longest rows, or of one more row if that makes more tokens."""

    def shape(context: int, **fields: Any) -> tuple[int, int]:
        batching = {"max_tokens": 16384, **fields}
        made = {"data": {"source": "x", "batching": batching}, "model": {"context": context}, "train": {"steps": 1}}
        return JobSpec.model_validate(made).largest_pass

    assert shape(512) == (32, 512)
    assert shape(10_000) == (2, 8192)
    assert shape(10_000, max=1) == (1, 10_000)
    assert shape(2048, min=32, max=256) == (32, 512)


@pytest.mark.parametrize(("epochs", "steps"), [(0.07, 7), (0.071, 8), (1, 100), (2.5, 250), (0.001, 1), (3.1, 310)])
def test_steps_of_a_fraction_of_an_epoch(epochs: float, steps: int) -> None:
    """As it is written: 0.07 * 100 is above 7 in floating point."""
    assert TrainSpec(epochs=epochs, global_batch=1).total(100) == steps
