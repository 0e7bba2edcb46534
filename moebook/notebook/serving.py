"""``moebook serve``: show the rendered book to browsers on this machine."""

from __future__ import annotations

import mimetypes
import os
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from moebook.errors import refuse
from moebook.results import folders

THREADS = 16  # requests that are answered at a time; the others wait
PATIENCE = 10  # seconds in which a browser must have sent its request, or taken the answer
TYPES = mimetypes.MimeTypes()  # without the system's own, which differ from one to another


def serve(folder: Path, port: int) -> None:
    """Serve the book of a project until interrupted."""
    place = folder / "_build" / "html"
    if not (folders.present(place) / "index.html").is_file():
        refuse("E-BOOK", "no book in _build/html; run: make book")
    try:
        site = Site(place, port)
    except OSError as error:
        refuse("E-PORT", f"port {port}: {error.strerror}; give another: make serve PORT=8001")
    with site:
        address = f"http://127.0.0.1:{site.server_port}"
        print(f"serve: the book is at {address} (Ctrl-C stops)", flush=True)
        site.serve_forever()


class Site(ThreadingHTTPServer):
    """Answers requests for the files of one folder, each in a thread, so many at a time."""

    daemon_threads = True
    request_queue_size = 128  # that wait in the system's queue; others are asked to come again

    def __init__(self, book: Path, port: int) -> None:
        self.book = book
        self.places = threading.BoundedSemaphore(THREADS)
        super().__init__(("127.0.0.1", port), Page)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread as soon as there is a place for it."""
        self.places.acquire()
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
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
        if content is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
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
    place of this one meanwhile (`folders.put`), so a file that has gone is looked for once more.
    """
    for _ in range(2):
        book = folders.present(place)
        try:
            path = Path(os.path.realpath(book / name, strict=True))
            if not path.is_relative_to(os.path.realpath(book)) or not path.is_file():
                return None
            return path.read_bytes()
        except (OSError, ValueError):  # none there, too long a name, one that no file can have
            continue
    return None
