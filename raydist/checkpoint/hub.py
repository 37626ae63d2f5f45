"""The folder of the weights that a run starts from (`model.hf`): a path that all nodes can read.

Runs in: the driver, before any worker starts, and each process under torchrun. Never torch.
"""

from __future__ import annotations

from pathlib import Path

from raydist import registry
from raydist.spec import JobSpec, parse
from raydist.spec.huggingface import HUB, download
from raydist.storage import Storage

CACHE = ".hub"
"""In the folder of the runs: models that were downloaded."""
FILES = ("*.json", "model*.safetensors")
"""What a model needs of a repository; some have the same weights a second time, in another format."""


def local(job: JobSpec, storage: str, *, present: bool = False) -> JobSpec:
    """`job` with absolute paths in `model.hf`, and in the options of the model that name files (`FILES` of its file).

    A model of a hub is downloaded to the storage of the runs, once; on an object store, which cannot be read as a folder, to
    huggingface_hub's own cache. `present`: it was downloaded before. Raises UserError.
    """
    home = Storage(storage).local
    cache = None if home is None else home / CACHE

    def path(name: str) -> str:
        found = download(name, FILES, cache, present=present) if name.startswith(HUB) else Path(name).expanduser()
        return str(found.absolute())

    model = job.model
    if model.hf is not None:
        model = model.model_copy(update={"hf": path(model.hf)})
    if named := options_with_files(job):
        model = model.model_copy(update={"options": {**model.options, **{key: path(n) for key, n in named.items()}}})
    if model is job.model:
        return job
    made = job.model_copy(update={"model": model})
    if any(name.startswith(HUB) for name in named.values()):  # a config that was not there when the job was read
        return parse(made.model_dump(mode="json"))
    return made


def options_with_files(job: JobSpec) -> dict[str, str]:
    """The options of the model that name files, and the names."""
    keys = registry.described("model", job.model.name, "FILES") or ()
    return {key: value for key in keys if isinstance(value := job.model.options.get(key), str)}
