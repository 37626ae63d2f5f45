"""The rules of axe-core, for the open page of a browser. axe/ has it as published on npm, unchanged, under the MPL 2.0."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.report.html.chromium import Chromium

VERSION = "4.14.1"
SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
AXE = Path(__file__).parent / "axe" / "axe.min.js"
_RUN = """axe.run(document).then((found) => found.violations.map((one) => [one.id, one.help, one.nodes[0].html]))"""


def check(browser: Chromium) -> None:
    """The page violates no rule of WCAG 2 A and AA, nor of axe-core's best practices."""
    script = AXE.read_bytes()
    assert hashlib.sha256(script).hexdigest() == SHA256
    assert script.startswith(f"/*! axe v{VERSION}".encode())
    browser.value(f"{script.decode()};1")
    assert browser.value(_RUN) == []
