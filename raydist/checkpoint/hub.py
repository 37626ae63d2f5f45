"""The folder of the weights that a run starts from (`model.hf`): a path or a URI that all nodes can read.

Runs in: the driver, before any worker starts, and each process under torchrun. Never torch.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from raydist import registry
from raydist.errors import UserError
from raydist.spec import JobSpec, parse
from raydist.spec.huggingface import HUB, download
from raydist.storage import Storage

CACHE = ".hub"
"""In the folder of the runs: models that were downloaded."""
FILES = ("*.json", "model*.safetensors")
"""What a model needs of a repository; some have the same weights a second time, in another format."""
COPY = "copy"
"""On an object store: the file that names the folder with the files of a model. It is written when all of them are there."""
_BLOCK = 16 << 20


def local(job: JobSpec, storage: str, *, present: bool = False) -> JobSpec:
    """`job` with absolute paths, or URIs, in `model.hf`, and absolute paths in the options of the model that name files (`FILES` of
    its file).

    A model of a hub is downloaded to the storage of the runs, once; on an object store `model.hf` alone, which can name a folder
    there: the others are in huggingface_hub's own cache. `present`: it was downloaded before. Raises UserError, StorageError.
    """
    home = Storage(storage)
    cache = None if home.local is None else home.local / CACHE

    def path(name: str) -> str:
        if name.startswith(HUB):
            return str(download(name, FILES, cache, present=present).absolute())
        return Storage(name).full_uri

    model = job.model
    if model.hf is not None:
        stored = home.local is None and model.hf.startswith(HUB)
        model = model.model_copy(update={"hf": _copied(model.hf, home) if stored else path(model.hf)})
    if named := options_with_files(job):
        if wrong := [name for name in named.values() if "://" in name and not name.startswith(HUB)]:
            raise UserError(
                f"model.options: {wrong[0]}: the library reads local files alone",
                "give a path that all nodes can read, or hf://OWNER/NAME",
            )
        model = model.model_copy(update={"options": {**model.options, **{key: path(n) for key, n in named.items()}}})
    if model is job.model:
        return job
    made = job.model_copy(update={"model": model})
    if any(name.startswith(HUB) for name in named.values()):  # a config that was not there when the job was read
        return parse(made.model_dump(mode="json"))
    return made


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
