"""A proxy in front of the tests' S3 server, which changes or breaks what passes."""

from __future__ import annotations

import contextlib
import re
import socket
import threading


class Proxy:
    """Each connection is served by `serve`, in a thread of its own. `server`, and `place` of the proxy: HOST:PORT."""

    def __init__(self, server: str) -> None:
        host, port = server.rsplit(":", 1)
        self.server = host, int(port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        """Serves one connection. An OSError ends it."""
        raise NotImplementedError

    def close(self) -> None:
        """Accepts no more connections."""
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listening.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            self.serve(client)


class Counting(Proxy):
    """Passes everything on. `ranges`: (first, last) byte of each range of an object that was requested; `requests`: how many there
    were."""

    def __init__(self, server: str) -> None:
        self._requests: list[bytearray] = []
        super().__init__(server)

    def serve(self, client: socket.socket) -> None:
        """Passes both directions on, and keeps what the client sends."""
        self._requests.append(sent := bytearray())
        with socket.create_connection(self.server) as server:
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            while data := client.recv(65536):
                sent += data
                server.sendall(data)

    @property
    def requests(self) -> int:
        return sum(len(re.findall(rb"(?:GET|HEAD|PUT|POST|DELETE) /\S* HTTP/1.1\r\n", sent)) for sent in self._requests)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        found = (re.findall(rb"\r\nrange: *bytes=(\d+)-(\d+)\r\n", bytes(sent), re.I) for sent in self._requests)
        return [(int(first), int(last)) for of_connection in found for first, last in of_connection]


def _copy(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(65536):
            client.sendall(data)
