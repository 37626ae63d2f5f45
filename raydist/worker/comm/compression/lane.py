"""Work that is done in order beside the training thread: on CPU by a thread, on CUDA by a stream.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch

Task = Callable[[], None]


class Lane:
    """Runs what `put` is given, one after another. `aside` False: at once, in the caller's thread and stream.

    A task must raise nothing. On CUDA a task is launched at once, on a stream that waits for what the caller has launched before.
    `stream`: lanes of one stream are one lane.
    """

    def __init__(self, name: str, stream: torch.cuda.Stream | None, aside: bool) -> None:
        self._stream, self._tasks = stream, None
        if aside and stream is None:
            self._tasks = tasks = queue.SimpleQueue[Task | None]()
            threading.Thread(target=_serve, args=(tasks,), name=f"raydist-{name}", daemon=True).start()
            weakref.finalize(self, tasks.put, None)

    def put(self, task: Task) -> None:
        """Has it run. No later task of this lane begins before it has returned."""
        if self._tasks is not None:
            self._tasks.put(task)
        elif self._stream is None:
            with torch.no_grad():
                task()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.no_grad(), torch.cuda.stream(self._stream):
                task()


def _serve(tasks: queue.SimpleQueue[Task | None]) -> None:
    torch.set_grad_enabled(False)  # a thread has a grad mode of its own
    while (task := tasks.get()) is not None:
        task()
        del task  # it refers to tensors, and to what waits for them
