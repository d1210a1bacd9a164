"""The output of workers: shown with the name of the worker and the time, and kept in files.

Each worker writes into two pipes. One thread reads them all, line by line, shows each line on the
stream that it belongs to, and appends it to the file of its worker. This process keeps the write
ends open, so that a worker that restarts opens the same pipes again.

State: `_partial` and the files belong to the thread; `_tails` is read when the thread has ended.
"""

from __future__ import annotations

import collections
import os
import selectors
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TextIO

STDOUT, STDERR = 1, 2
_TAIL = 20  # lines
_CHUNK = 1 << 16


class Output:
    """The output of these workers. Use it as a context manager around their lives."""

    def __init__(
        self, names: Iterable[str], folder: Path, stdout: TextIO | None, stderr: TextIO | None
    ) -> None:
        self._names = list(names)
        self._width = max(map(len, self._names))
        self._streams = {STDOUT: stdout, STDERR: stderr}
        self.folder = folder
        self._tails: dict[str, collections.deque[str]] = {
            name: collections.deque(maxlen=_TAIL) for name in self._names
        }
        self._pipes = {
            (name, stream): os.pipe() for name in self._names for stream in (STDOUT, STDERR)
        }
        self._partial: dict[tuple[str, int], bytes] = collections.defaultdict(bytes)
        self._files: dict[str, IO[bytes]] = {}
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._read, name="telegrad-output", daemon=True)

    def __enter__(self) -> Output:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: self.log(name).open("ab") for name in self._names}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._wake[1], b"\0")
        self._thread.join()
        for file in self._files.values():
            file.close()
        for pipe in (*self._pipes.values(), self._wake):
            for end in pipe:
                os.close(end)

    def path(self, name: str, stream: int) -> str:
        """Return a path that the worker opens to write to this stream."""
        return f"/proc/{os.getpid()}/fd/{self._pipes[name, stream][1]}"

    def log(self, name: str) -> Path:
        """Return the file of a worker."""
        return self.folder / f"{name}.log"

    def tail(self, name: str) -> list[str]:
        """Return the last lines of a worker. This object must have been closed."""
        return list(self._tails[name])

    def note(self, name: str, text: str) -> None:
        """Add a line to the errors of a worker."""
        os.write(self._pipes[name, STDERR][1], f"[{text}]\n".encode())

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for key, (end, _) in self._pipes.items():
                os.set_blocking(end, False)
                selector.register(end, selectors.EVENT_READ, key)
            selector.register(self._wake[0], selectors.EVENT_READ)
            closing = False
            while True:
                ready = selector.select(0 if closing else None)
                keys = [(key.fd, key.data) for key, _ in ready if key.data is not None]
                if closing and not keys:
                    break
                closing = closing or len(keys) < len(ready)
                for end, (name, stream) in keys:
                    self._add(name, stream, os.read(end, _CHUNK))
        for (name, stream), rest in self._partial.items():
            if rest:
                self._add(name, stream, b"\n")

    def _add(self, name: str, stream: int, data: bytes) -> None:
        *lines, self._partial[name, stream] = (self._partial[name, stream] + data).split(b"\n")
        for line in lines:
            self._add_line(name, stream, line.decode(errors="replace"))
        self._files[name].flush()

    def _add_line(self, name: str, stream: int, line: str) -> None:
        now = time.strftime("%H:%M:%S")
        self._tails[name].append(line)
        self._files[name].write(f"{now} {line}\n".encode())
        shown = self._streams[stream]
        if shown is not None:
            shown.write(f"{now} {name:<{self._width}} | {line}\n")
            shown.flush()
