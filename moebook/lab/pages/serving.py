"""``moebook serve``: show the rendered book to browsers on this machine, and renew it on changes.

Pages, protocols, notebooks and runs are looked at twice a second. What has changed is executed and
rendered in a process of its own, as `moebook book` does, and the browsers load their page again.
Code is not watched: a change of it concerns all notebooks, which `moebook book` executes.
"""

from __future__ import annotations

import mimetypes
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from moebook import storage
from moebook.errors import refuse
from moebook.lab.run import children, sources
from moebook.storage import folders

RENEW = """
import sys
from pathlib import Path
from moebook.errors import Refusal
from moebook.lab.pages import book
try:
    book.renew(sys.argv[1:], Path.cwd())
except Refusal as refusal:
    sys.exit(str(refusal))
"""
WATCHED = ("book", "notebooks", "results", "_config.yml")
MADE = ("book/notebooks/", "book/_generated/")  # by builds
MOMENT = 0.5  # seconds
CHANGED = ".changed"  # what a page asks for to know whether it was renewed
RELOAD = f"""<script>
let known
setInterval(async () => {{
  if (document.hidden) return
  const now = await fetch("/{CHANGED}").then((answer) => answer.text()).catch(() => known)
  if (known && now !== known) location.reload()
  known = now
}}, 1000)
</script>
</body>"""
LOOKS = 5  # for a file, while another folder takes the place of its own
THREADS = 16  # requests that are answered at a time; the others wait
# Seconds in which a browser must have sent its request, or taken the answer.
PATIENCE = 10
# Without the system's own, which differ from one to another.
TYPES = mimetypes.MimeTypes()


def serve(folder: Path, port: int) -> None:
    """Serve the book of a project until interrupted, and renew it when its sources change."""
    place = folder / "_build" / "html"
    if not (folders.present(place) / "index.html").is_file():
        refuse("E-BOOK", "no book in _build/html; run: make book")
    try:
        site = Site(place, port)
    except OSError as error:
        refuse(
            "E-PORT",
            f"port {port}: {error.strerror}; give another: make serve PORT=8001",
        )
    with site:
        address = f"http://127.0.0.1:{site.server_port}"
        print(f"serve: the book is at {address} (Ctrl-C stops)", flush=True)
        threading.Thread(
            target=watch, args=(folder, threading.Event()), daemon=True
        ).start()
        site.serve_forever()


def watch(folder: Path, stop: threading.Event) -> None:
    """Renew the book, until told to stop, when its sources have changed and are still a moment."""
    known = stamps(folder)
    while not stop.wait(MOMENT):
        now = stamps(folder)
        if now == known:
            continue
        while (later := settled(folder)) != now:
            now = later
        changed = sorted({path for path, _ in known.items() ^ now.items()})
        if not changed:  # a file came and went, as editors' probes do
            continue
        known = now
        print(f"serve: {changed[0]} has changed", flush=True)
        if renew(changed, folder) == 0:
            print("serve: the book is renewed", flush=True)


def settled(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the `stamps` a moment later."""
    time.sleep(MOMENT)
    return stamps(folder)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return when each source of the book was written, and its size, by its path."""
    written = {}
    for part in WATCHED:
        for path in _files(folder / part):
            below = path.relative_to(folder)
            name = below.as_posix()
            if name.startswith(MADE) or any(map(storage.files.foreign, below.parts)):
                continue
            with suppress(FileNotFoundError):  # it has just gone
                state = path.stat()
                if stat.S_ISREG(state.st_mode):
                    written[name] = (state.st_mtime_ns, state.st_size)
    return written


def _files(place: Path) -> Iterator[Path]:
    """Yield a file, or those below a folder; a folder that goes in the meantime is passed over."""
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names)


def renew(changed: Sequence[str], folder: Path) -> int:
    """Execute the notebooks that are concerned and render the book; what it says is shown here."""
    names = sorted(concerned(changed, folder))
    with children.lifeline() as (waiting, _):
        files = (waiting, sys.stdout.fileno(), sys.stderr.fileno())
        return children.start(RENEW, *names, folder=folder, files=files).wait()


def concerned(changed: Sequence[str], folder: Path) -> set[str]:
    """Return the notebooks that files concern: their own, and all findings if runs are new."""
    known = sources.paths(folder)
    names = set[str]()
    for path in changed:
        part, _, name = path.partition("/")
        if part == "notebooks":
            names |= {
                one
                for one, source in known.items()
                if name.startswith(f"{source.stem}.")
            }
        if part == "results":
            names |= {one for one in known if one.endswith("_findings")}
    return names


class Site(ThreadingHTTPServer):
    """Answers requests for the files of one folder, each in a thread, so many at a time."""

    daemon_threads = True
    # That wait in the system's queue; others are asked to come again.
    request_queue_size = 128

    def __init__(self, book: Path, port: int) -> None:
        self.book = book
        self.places = threading.BoundedSemaphore(THREADS)
        super().__init__(("127.0.0.1", port), Page)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread as soon as there is a place for it."""
        self.places.acquire()
        super().process_request(request, client_address)

    def shutdown_request(
        self, request: socket.socket | tuple[bytes, socket.socket]
    ) -> None:
        """Close the connection, which every request ends with, and give its place free."""
        super().shutdown_request(request)
        self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of browsers that went away; a fault of ours is told in full."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Page(BaseHTTPRequestHandler):
    """One request: a file of the book, or an answer that there is none."""

    server: Site
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Answer with a file's content."""
        self._answer(whole=True)

    def do_HEAD(self) -> None:
        """Answer with a file's size and type."""
        self._answer(whole=False)

    def log_message(self, *_: Any) -> None:
        """Print no line a request."""

    def _answer(self, *, whole: bool) -> None:
        path = unquote(self.path.partition("?")[0].partition("#")[0])
        name = path.lstrip("/") or "index.html"
        content = content_of(self.server.book, name)
        if name == CHANGED:
            content = state_of(self.server.book)
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        if name.endswith(".html"):
            content = content.replace(b"</body>", RELOAD.encode())
        kind = TYPES.guess_type(name)[0] or "application/octet-stream"
        text = kind.startswith("text/") or kind.endswith(("javascript", "json", "+xml"))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind + "; charset=utf-8" * text)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        if whole:
            self.wfile.write(content)


def content_of(place: Path, name: str) -> bytes | None:
    """Read a file below a folder whole; None where there is none, or a link leads out of it.

    Whatever the name holds is looked for there and nowhere else. Another folder may take the
    place of this one meanwhile (`folders.put`), so a file that has gone is looked for again.
    """
    for _ in range(LOOKS):
        book = folders.present(place)
        # None there, too long a name, or one that no file can have.
        with suppress(OSError, ValueError):
            path = Path(os.path.realpath(book / name, strict=True))
            if not path.is_relative_to(os.path.realpath(book)):
                return None
            if path.is_file():
                return path.read_bytes()
    return None


def state_of(place: Path) -> bytes:
    """Return a text that is another one when another folder has taken the place."""
    state = folders.present(place).stat()
    return f"{state.st_ino} {state.st_ctime_ns}".encode()
