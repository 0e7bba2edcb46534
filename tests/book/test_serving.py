"""The served book: every path has an answer, and a change of its sources renews it."""

import json
import os
import re
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from moebook import storage
from moebook.lab.pages import rendering, serving
from moebook.lab.run import freshness
from moebook.storage import folders
from tests.lab.conftest import TOY, make_project
from tests.refusals import refused


def fill(place, text):
    (place / "notebooks").mkdir(parents=True)
    for name in ("index.html", "notebooks/a b.html", "_static/move.js"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


@pytest.fixture
def place(tmp_path):
    """A book, and what must not be read beside it."""
    book = fill(tmp_path / "_build" / "html", "<html>ä page</html>")
    (tmp_path / "_build" / "secret.html").write_text("secret")
    (book / "link.html").symlink_to("notebooks/a b.html")
    (book / "out.html").symlink_to(tmp_path / "_build" / "secret.html")
    (book / "away").symlink_to(tmp_path / "_build")
    (book / "circle").symlink_to(book / "circle")
    return book


@pytest.fixture
def fresh(tmp_path):
    """A project of one notebook."""
    return make_project(tmp_path / "toy", *TOY)


@pytest.fixture
def site(place):
    with serving.Site(place, 0) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(site, line, rest=b"\r\n\r\n"):
    """Send a request's first line as it is; return status, head and body."""
    with socket.create_connection(site.server_address, timeout=20) as connection:
        connection.sendall(line + rest)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    # What is no request of HTTP/1.0 has an answer without a head.
    status = re.match(rb"HTTP/1.0 (\d+)", head) or re.search(
        rb"Error code: (\d+)", answer
    )
    return int(status[1]), head, body


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"/", 200),
        (b"/index.html", 200),
        (b"//index.html?a=b", 200),
        (b"/index.html#part", 200),
        (b"/notebooks/a%20b.html", 200),
        (b"/_static/move.js", 200),
        (b"/link.html", 200),
        (b"/out.html", 404),
        (b"/away/secret.html", 404),
        (b"/circle", 404),
        (b"/notebooks", 404),
        (b"/notebooks/", 404),
        (b"/../secret.html", 404),
        (b"/%2e%2e/secret.html", 404),
        (b"/..%2fsecret.html", 404),
        (b"/away/html/index.html", 200),
        (b"//etc/passwd", 404),
        (b"/%00", 404),
        (b"/index.html%00", 404),
        (b"/%ff%fe", 404),
        (b"/\xff", 404),
        (b"/[", 404),
        (b"http://[/", 404),
        (b"/%", 404),
        (b"/" + 5000 * b"a", 404),
        (b"/" + 2000 * b"a/", 404),
        (b"/" + 70000 * b"a", 414),
        (b"*", 404),
        (b"/%ed%a0%80", 404),
        (b"/C:%5cx", 404),
    ],
)
def test_every_path_has_an_answer_and_nothing_is_read_outside_the_book(
    site, capfd, path, status
):
    found, head, body = ask(site, b"GET " + path + b" HTTP/1.0")
    assert found == status
    assert b"secret" not in body
    assert b"root:" not in body
    if status == 200:
        page = "<html>ä page</html>"
        assert body.decode() == page
        kind = rb"\w+/javascript" if b".js" in path else b"text/html"
        assert re.search(rb"Content-Type: " + kind + rb"; charset=utf-8\r\n", head)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"HEAD / HTTP/1.0", 200),
        (b"POST / HTTP/1.0", 501),
        (b"GET / HTTP/9.9", 505),
        (b"G\x00", 400),
        (b"GET", 400),
        (b"GET / HTTP/1.0\r\n" + 200 * b"a: b\r\n", 431),
    ],
)
def test_other_requests_are_answered_too(site, capfd, line, status):
    found, _, body = ask(site, line)
    assert found == status
    assert status != 200 or body == b""
    assert capfd.readouterr() == ("", "")


def test_idle_browsers_hold_so_many_threads_and_for_a_time(site, monkeypatch, capfd):
    assert serving.Page.timeout == serving.PATIENCE
    monkeypatch.setattr(serving.Page, "timeout", 0.5)
    before = threading.active_count()
    most = 0
    with ExitStack() as idle:
        for _ in range(5 * serving.THREADS):
            connection = socket.create_connection(site.server_address)
            idle.enter_context(connection)
            connection.send(b"GET /")
            time.sleep(0.005)
            most = max(most, threading.active_count() - before)
        limit = time.monotonic() + 10  # on a busy machine some are served later
        while most < serving.THREADS and time.monotonic() < limit:
            time.sleep(0.005)
            most = max(most, threading.active_count() - before)
        assert most == serving.THREADS
    assert ask(site, b"GET / HTTP/1.0")[0] == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("system", ["exchanges", "renames"])
def test_a_reader_meets_whole_pages_while_another_book_takes_the_place(
    site, place, monkeypatch, system
):
    if system == "renames":
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    stop = threading.Event()
    met = set()

    def read():
        while not stop.is_set():
            status, _, body = ask(site, b"GET /notebooks/a%20b.html HTTP/1.0")
            met.add((status, len(body)))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(100):
        folders.put(
            fill(place.with_name("new"), f"<html>{number:06d}</html>" * 999), place
        )
    stop.set()
    for reader in readers:
        reader.join()
    assert {status for status, _ in met} == {200}
    assert {size for _, size in met} <= {20, 999 * 19}


def test_without_a_book_or_a_free_port_serving_is_refused(tmp_path, site, place):
    refused(
        "E-BOOK: no book in _build/html; run: make book",
        serving.serve,
        tmp_path / "other",
        0,
    )
    taken = site.server_port
    refused(f"E-PORT: port {taken}: .*make serve PORT", serving.serve, tmp_path, taken)


def test_a_page_asks_whether_it_was_renewed_and_its_file_stays_as_it_is(site, place):
    page = place / "index.html"
    page.write_text("<html><body>text</body></html>")
    _, head, body = ask(site, b"GET / HTTP/1.0")
    assert b'fetch("/.changed")' in body
    assert body.startswith(b"<html><body>text<script>")
    assert b"Content-Length: %d" % len(body) in head
    assert body.endswith(b"</script>\n</body></html>")
    assert page.read_text() == "<html><body>text</body></html>"
    states = [ask(site, b"GET /.changed HTTP/1.0")[2] for _ in range(2)]
    folders.put(fill(place.with_name("new"), "another"), place)
    states.append(ask(site, b"GET /.changed HTTP/1.0")[2])
    assert states[0] == states[1] != states[2]
    assert b"" not in states


def test_a_change_concerns_its_notebook_and_runs_concern_all_findings(fresh):
    for name in ("01_toy_findings.ipynb", "02_other.ipynb"):
        (fresh / "notebooks" / name).touch()
    told = {
        ("book/intro.md", "_config.yml"): set(),
        ("notebooks/01_toy.ipynb",): {"toy"},
        ("notebooks/01_toy.nano.yaml", "notebooks/02_other.ipynb"): {"toy", "other"},
        ("notebooks/01_toy_findings.ipynb",): {"toy_findings"},
        ("notebooks/README.md",): set(),
        ("results/toy/nano/1.parquet",): {"toy_findings"},
    }
    for changed, names in told.items():
        assert serving.concerned(changed, fresh) == names


def test_sources_are_watched_and_what_builds_write_is_not(fresh):
    (fresh / "book" / "notebooks").mkdir(parents=True)
    before = serving.stamps(fresh)
    for name in (
        "book/notebooks/01_toy.ipynb",
        "book/.a.md.swp",
        "book/a.md~",
        "book/.ipynb_checkpoints/a-checkpoint.ipynb",
        "runs/a",
        "README.md",
    ):
        storage.write(fresh / name, "new")
    assert serving.stamps(fresh) == before
    for name in (
        "book/a.md",
        "book/_static/a.js",
        "results/a",
        "notebooks/01_toy.nano.yaml",
    ):
        storage.write(fresh / name, "new")
        assert serving.stamps(fresh).keys() ^ before.keys() <= {name}
        assert serving.stamps(fresh)[name] != before.get(name)
        before = serving.stamps(fresh)
    (fresh / "book" / "a.md").unlink()
    assert before.keys() - serving.stamps(fresh).keys() == {"book/a.md"}


def test_a_folder_that_goes_while_it_is_looked_at_is_passed_over(fresh, monkeypatch):
    before = serving.stamps(fresh)
    place = fresh / "results" / "toy"
    place.mkdir(parents=True)
    scandir = os.scandir

    def goes_first(path="."):
        if Path(path) == place and place.exists():
            place.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", goes_first)
    assert serving.stamps(fresh) == before
    assert not place.exists()


def test_a_file_that_comes_and_goes_is_no_change(fresh, monkeypatch, capsys):
    here = serving.stamps(fresh)
    there = here | {"book/4913": (1, 1)}
    # Before the watch, in its first look, a moment later, settled, and from then on.
    seen = iter([here, there, here, here])
    monkeypatch.setattr(serving, "MOMENT", 0.001)
    monkeypatch.setattr(serving, "stamps", lambda folder: next(seen, here))
    stop = threading.Event()
    watching = threading.Thread(target=serving.watch, args=(fresh, stop))
    watching.start()
    time.sleep(0.1)
    assert watching.is_alive()
    stop.set()
    watching.join()
    assert capsys.readouterr().out == ""


def test_a_changed_page_is_shown_renewed_and_a_wrong_one_is_told(
    project, warmed, monkeypatch, capfd
):
    book = project / "book"
    (book / "_generated").mkdir()
    (book / "_static").mkdir()
    style = book / "_static" / "own.css"
    style.write_text("p { color: red }")
    told = {"extra_extensions": ["moebook.lab.pages.extension"]}
    told["config"] = {"html_static_path": ["_static"]}
    (book / "_config.yml").write_text(json.dumps({"sphinx": told}))
    made_of = freshness.digest(project, freshness.SHOWN)
    freshness.seal(book / "_generated", made_of)
    rendering.render(project, place=warmed)
    monkeypatch.setattr(serving, "MOMENT", 0.1)
    stamps, looked = serving.stamps, threading.Event()

    def look(folder):
        found = stamps(folder)
        looked.set()
        return found

    monkeypatch.setattr(serving, "stamps", look)
    stop = threading.Event()
    watching = threading.Thread(target=serving.watch, args=(project, stop))
    watching.start()
    place = project / "_build" / "html"
    assert looked.wait(60)

    def change(path, text, line):
        path.write_text(text)
        shown = ""
        limit = time.monotonic() + 120
        while line not in shown and time.monotonic() < limit:
            time.sleep(0.1)
            shown += "".join(capfd.readouterr())
        assert line in shown
        assert f"serve: {path.relative_to(project)} has changed" in shown

    page = book / "page_1.md"
    change(page, "# One\n\n{ref}`none`\n", "E-BOOK")
    assert b"What is new." not in serving.content_of(place, "page_1.html")
    change(page, "# One\n\nWhat is new.\n", "renewed")
    assert b"What is new." in serving.content_of(place, "page_1.html")
    change(style, "p { color: blue }", "renewed")
    assert b"blue" in serving.content_of(place, "_static/own.css")
    stop.set()
    watching.join()
