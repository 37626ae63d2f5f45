"""The folder of the weights that a run starts from (`model.hf`): a path or a URI that all nodes can read.

Runs in: the driver, before any worker starts, and each process under torchrun. Never torch.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from raydist import registry
from raydist.spec import JobSpec, parse
from raydist.spec.huggingface import HUB, download, read_config
from raydist.storage import Storage

CACHE = ".hub"
"""In the folder of the runs: models that were downloaded."""
FILES = ("*.json", "*.jinja", "model*.safetensors")
"""What a model, its tokenizer and its template need of a repository; some have the same weights again, in another format."""
COPY = "copy"
"""On an object store: the file that names the folder with the files of a model. It is written when all of them are there."""
_BLOCK = 16 << 20


def local(job: JobSpec, storage: str, *, present: bool = False) -> JobSpec:
    """`job` with absolute paths, or URIs, in `model.hf` and in the options of the model that name files (`FILES` of its file).

    A model of a hub is downloaded to the storage of the runs, once. Of options on an object store the config's values are given
    with the job, for all processes that read it. `present`: it was downloaded before. Raises UserError, StorageError.
    """
    home = Storage(storage)

    def place(name: str) -> str:
        if not name.startswith(HUB):
            return Storage(name).full_uri
        if home.local is None:
            return _copied(name, home)
        return str(download(name, FILES, home.local / CACHE, present=present).absolute())

    model = job.model
    if model.hf is not None:
        model = model.model_copy(update={"hf": place(model.hf)})
    named = options_with_files(job)
    if named:
        options = {**model.options, **{key: place(name) for key, name in named.items()}}
        described = options.get("config") or options.get("weights")
        if isinstance(described, str) and "://" in described:
            options["config"] = read_config(Storage(described))
        model = model.model_copy(update={"options": options})
    if model is job.model:
        return job
    made = job.model_copy(update={"model": model})
    # A config that could not be read with the job is checked now.
    return parse(made.model_dump(mode="json")) if any("://" in name for name in named.values()) else made


def _copied(name: str, home: Storage) -> str:
    """The URI of a model of a hub in the runs' storage, an object store, which gets it from huggingface_hub's own cache.

    Of several drivers that copy it at once, each writes a folder of its own; that of the first to finish is used.
    """
    owner, _, revision = name.removeprefix(HUB).partition("@")
    revision = revision or download(name, ["config.json"]).name
    model = home.at(f"{CACHE}/models--{owner.replace('/', '--')}/{revision}")
    if not model.exists(COPY):
        own = uuid.uuid4().hex[:8]
        for path in filter(Path.is_file, download(name, FILES).iterdir()):
            with path.open("rb") as file, model.create(f"{own}/{path.name}") as sink:
                shutil.copyfileobj(file, sink, _BLOCK)
        if not model.write_new(COPY, own.encode()):
            model.delete(own)
    return model.at(model.read(COPY).decode()).full_uri


def options_with_files(job: JobSpec) -> dict[str, str]:
    """The options of the model that name files, and the names."""
    keys = registry.described("model", job.model.name, "FILES") or ()
    return {key: value for key in keys if isinstance(value := job.model.options.get(key), str)}
