"""The folder of the weights that a run starts from (`model.hf`): a path that all nodes can read.

Runs in: the driver, before any worker starts, and each process under torchrun. Never torch.
"""

from __future__ import annotations

from pathlib import Path

from raydist.spec import JobSpec
from raydist.spec.huggingface import HUB, download
from raydist.storage import Storage

CACHE = ".hub"
"""In the folder of the runs: models that were downloaded."""
FILES = ("*.json", "model*.safetensors")
"""What a model needs of a repository; some have the same weights a second time, in another format."""


def local(job: JobSpec, storage: str, *, present: bool = False) -> JobSpec:
    """`job` with the absolute path of a folder in `model.hf`; a model of a hub is downloaded to the storage of the runs, once.

    On an object store, which cannot be read as a folder, huggingface_hub's own cache has it. `present`: it was downloaded before.
    Raises UserError.
    """
    name = job.model.hf
    if name is None:
        return job
    if name.startswith(HUB):
        home = Storage(storage).local
        folder = download(name, FILES, None if home is None else home / CACHE, present=present)
    else:
        folder = Path(name).expanduser()
    return job.model_copy(update={"model": job.model.model_copy(update={"hf": str(folder.absolute())})})
