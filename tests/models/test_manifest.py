"""A sealed folder verifies, and any change to it is told."""

import json

import pytest

from moebook.errors import Refusal
from moebook.models import manifest


@pytest.fixture
def sealed(tmp_path):
    stage = tmp_path / ".stage"
    stage.mkdir()
    (stage / "a.json").write_text("[1, 2]")
    (stage / "b.bin").write_bytes(b"abc")
    manifest.seal(stage, recipe="r")
    manifest.commit(stage, tmp_path / "done")
    return tmp_path / "done"


def test_a_sealed_folder_verifies_and_keeps_its_facts(sealed):
    read = manifest.verify(sealed)
    assert read["recipe"] == "r"
    assert read["sizes"] == {"a.json": 6, "b.bin": 3}
    # sha256 of "abc", from FIPS 180-2
    assert read["files"]["b.bin"].startswith("ba7816bf8f01cfea414140de5dae2223")


def flip(folder):
    (folder / "b.bin").write_bytes(b"abd")


def cut(folder):
    (folder / "b.bin").write_bytes(b"ab")


def add(folder):
    (folder / "c.json").write_text("{}")


def drop(folder):
    (folder / "a.json").unlink()


def link(folder):
    (folder / "b.bin").rename(folder.parent / "b.bin")
    (folder / "b.bin").symlink_to(folder.parent / "b.bin")


def point_outside(folder):
    content = json.loads((folder / manifest.NAME).read_text())
    content["files"]["../../x"] = content["files"].pop("a.json")
    (folder / manifest.NAME).write_text(json.dumps(content))


def scramble(folder):
    (folder / manifest.NAME).write_text("{")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (flip, "E-HASH"),
        (cut, "E-HASH"),
        (add, "E-MANIFEST"),
        (drop, "E-MANIFEST"),
        (link, "E-PATH"),
        (point_outside, "E-MANIFEST"),
        (scramble, "E-MANIFEST"),
    ],
)
def test_every_change_is_refused_with_its_code(sealed, damage, code):
    damage(sealed)
    with pytest.raises(Refusal, match=code):
        manifest.verify(sealed)


def test_a_commit_never_replaces_what_is_there(sealed, tmp_path):
    stage = tmp_path / ".again"
    stage.mkdir()
    manifest.seal(stage)
    with pytest.raises(OSError):
        manifest.commit(stage, sealed)
    assert (sealed / "b.bin").read_bytes() == b"abc"
