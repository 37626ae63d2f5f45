"""A file system that a test mounts and unmounts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import needs


class Disk:
    """A file system at `home`: as root mounted, else a folder that is renamed."""

    def __init__(self, root: Path) -> None:
        self.home, self._content = root / "home", root / "content"
        self._real = needs.NEEDS["mount"].there()
        self._content.mkdir()
        self.home.mkdir()
        self.mount()

    def mount(self) -> None:
        assert list(self.home.iterdir()) == [], "something was written below the mount point"
        if self._real:
            subprocess.run(["mount", "--bind", str(self._content), str(self.home)], check=True)
        else:
            self.home.rmdir()
            self._content.rename(self.home)
        self.mounted = True  # os.path.ismount() sees no bind mount of the same file system

    def unmount(self) -> None:
        self.mounted = False
        if self._real:
            subprocess.run(["umount", str(self.home)], check=True)
        else:
            self.home.rename(self._content)
            self.home.mkdir()
