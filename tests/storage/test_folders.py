"""A folder takes the place of whatever stands there, and goes whatever it is."""

import pytest

from moebook.storage import folders


@pytest.fixture
def real(tmp_path):
    """A folder that a link leads to, and that must stay."""
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    return folder


def standing(kind, place, real):
    """Put a folder, a file or a link in a place."""
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("a file")
    elif kind == "link":
        place.symlink_to(real)
    else:
        place.symlink_to(real / "nothing")


KINDS = ("folder", "file", "link", "dangling link")


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_is_gone_and_what_a_link_leads_to_stays(kind, tmp_path, real):
    place = tmp_path / "html"
    # What a kill left behind is of any kind, too.
    standing(kind, tmp_path / ".html.gone", real)
    standing(kind, place, real)
    folders.remove(place)
    assert [path.name for path in tmp_path.iterdir()] == ["real"]
    assert (real / "kept").read_text() == "kept"
    folders.remove(place)  # where nothing is, nothing goes


@pytest.mark.parametrize("able", [True, False], ids=["exchanged", "aside"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_takes_the_place_of_whatever_stands_there(
    kind, able, tmp_path, real, monkeypatch
):
    if not able:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    place = tmp_path / "html"
    standing(kind, place, real)
    for text in ("first", "second"):
        new = tmp_path / ".html.new"
        new.mkdir()
        (new / "page").write_text(text)
        folders.put(new, place)
        assert (place / "page").read_text() == text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["html", "real"]
    assert (real / "kept").read_text() == "kept"
