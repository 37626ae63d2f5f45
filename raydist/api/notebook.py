"""How runs and sweeps look in a notebook: a frame with their page, which is drawn again while a run trains. No widget is needed.

Runs in: the user's process. Imports IPython only where a notebook has.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raydist.errors import StorageError

if TYPE_CHECKING:
    from raydist.api.runs import Run
    from raydist.run.directory import RunDir

REFRESH_S = 2.0
HEIGHT = 760
"""Of a frame, in pixels."""
_SHARE = 0.1
"""The share of the time that drawing may take: a long run is drawn less often."""


def frame(page: bytes) -> str:
    """HTML in which a notebook shows a page; the page's style and script keep to it."""
    return (
        f'<iframe srcdoc="{html.escape(page.decode())}" title="raydist" loading="lazy" '
        f'style="width:100%;height:{HEIGHT}px;border:0"></iframe>'
    )


def card(run: RunDir) -> str:
    """The figures and the curves of a run, as HTML. Raises StorageError."""
    from raydist.report import run_metrics
    from raydist.report.html.run import overview

    return frame(overview(run_metrics.report(run)))


@contextmanager
def live(run: Run) -> Iterator[Callable[[], None]]:
    """What it gives is to be called often: it shows the run in this notebook cell, and draws it again when that is due."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        yield lambda: None
        return
    from IPython.display import HTML, display

    handle: Any = None
    due = 0.0

    def draw() -> None:
        nonlocal handle, due
        begun = time.monotonic()
        try:
            shown = HTML(card(run.folder))
        except (StorageError, FileNotFoundError):  # its first files are not written yet
            return
        if handle is None:
            handle = display(shown, display_id=True)
        else:
            handle.update(shown)
        now = time.monotonic()
        due = now + max(REFRESH_S, (now - begun) / _SHARE)

    def refresh() -> None:
        if time.monotonic() >= due:
            draw()

    try:
        yield refresh
    finally:
        draw()
