"""A headless Chromium, controlled by the DevTools protocol over a pipe; the network is off, unless a test enables it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import needs

WAIT_S = 120.0
"""Timeout of an answer: a browser that hangs must not hang the tests."""


class Chromium:
    """A context manager. `folder`: its profile. `online`: whether pages can use a network."""

    def __init__(self, folder: Path, online: bool = False) -> None:
        self._offline = not online
        needs.require("chromium")
        down, self._down = os.pipe()
        self._up, up = os.pipe()
        # Chromium uses 3 and 4; the pipe's ends get numbers that do not collide with these.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (down, up)]
        place = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]} {ends[0]}<&- {ends[1]}>&-'
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        with (folder / "chromium.log").open("w") as log:
            self._process = subprocess.Popen(
                [
                    "bash",
                    "-c",
                    place,
                    "bash",
                    "chromium",
                    *flags,
                    "--remote-debugging-pipe",
                    f"--user-data-dir={folder}",
                    "about:blank",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=ends,
            )
        for fd in (down, up, *ends):
            os.close(fd)
        self._rest, self._number = b"", 0
        self.told: list[dict[str, Any]] = []
        """Events of the open page, in order."""

    def __enter__(self) -> Chromium:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")
        self.page("Page.setLifecycleEventsEnabled", enabled=True)
        if self._offline:
            self.page(
                "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask("Browser.close")
        self._process.wait(WAIT_S)
        os.close(self._down)
        os.close(self._up)

    def ask(self, method: str, session: str | None = None, /, **parameters: Any) -> Any:
        """The result of a command. Raises AssertionError with Chromium's message if it fails."""
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": parameters,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def page(self, method: str, **parameters: Any) -> Any:
        """`ask`, for the open page."""
        return self.ask(method, self._session, **parameters)

    def open(
        self, page: Path | str, width: int = 1280, height: int = 900, dark: bool = False, media: str = "screen"
    ) -> None:
        """Loads a file or an address, and waits until its script has run."""
        self.page("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.page("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.told.clear()
        loader = self.page("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)["loaderId"]
        loaded = {"name": "load", "loaderId": loader}  # not of the page before, which may be loading
        while not any(
            event["method"] == "Page.lifecycleEvent" and loaded.items() <= event["params"].items()
            for event in self.told
        ):
            self._read()

    def value(self, script: str) -> Any:
        """The value of an expression in the page, as plain data; a promise is awaited. Raises AssertionError with the error it
        throws."""
        found = self.page("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, selector: str, accept: bool) -> str:
        """Clicks an element that asks a question by `confirm`, and answers it. Returns the question."""
        self.value(f"void setTimeout(() => document.querySelector({json.dumps(selector)}).click())")
        while True:
            asked = [e["params"]["message"] for e in self.told if e["method"] == "Page.javascriptDialogOpening"]
            if asked:
                break
            self._read()
        self.told.clear()
        self.page("Page.handleJavaScriptDialog", accept=accept)
        return str(asked[-1])

    def until(self, true: str) -> None:
        """Waits for an expression to be true, also across pages that follow one another."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if self.value(true):
                    return
            except AssertionError as error:  # the page has just been replaced by the next one
                if not re.search("navigated|context", str(error)):
                    raise
            assert time.monotonic() < deadline, (true, self.complaints)
            time.sleep(0.1)  # another process answers the page

    def point(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self.page("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """Saves the whole page as a PNG."""
        shot = self.page("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self) -> list[str]:
        """Messages of the console, and errors of scripts."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.told if event["method"] in kinds]

    @property
    def asked(self) -> list[str]:
        """Addresses of all requests of the page, including its own."""
        return [e["params"]["request"]["url"] for e in self.told if e["method"] == "Network.requestWillBeSent"]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._up], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has not answered for {WAIT_S:g} s"
            data = os.read(self._up, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.told.append(message)
        return message
