"""A sealed folder tells every change; a fingerprint changes with any bit of a base."""

import hashlib
import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from moebook import storage
from moebook.models import checkpoint, fingerprint
from tests.refusals import refused


@pytest.fixture
def sealed(tmp_path):
    with checkpoint.building(tmp_path / "done", recipe="r") as stage:
        (stage / "a.json").write_text("[1, 2]")
        (stage / "b.bin").write_bytes(b"abc")
    return tmp_path / "done"


def test_a_sealed_folder_verifies_and_keeps_its_facts(sealed):
    manifest = checkpoint.verify(sealed)
    assert manifest["recipe"] == "r"
    assert manifest["sizes"] == {"a.json": 6, "b.bin": 3}
    # sha256 of "abc", from FIPS 180-2
    assert manifest["files"]["b.bin"].startswith("ba7816bf8f01cfea414140de5dae2223")


def link(folder):
    (folder / "b.bin").rename(folder.parent / "b.bin")
    (folder / "b.bin").symlink_to(folder.parent / "b.bin")


def point_outside(folder):
    manifest = folder / checkpoint.MANIFEST
    content = json.loads(manifest.read_text())
    content["files"]["../../x"] = content["files"].pop("a.json")
    manifest.write_text(json.dumps(content))
    (folder / checkpoint.DIGEST).write_text(
        f"{storage.digest(manifest)}  {manifest.name}\n"
    )


CHANGES = {
    "add": (lambda folder: (folder / "c.json").write_text("{}"), "E-MANIFEST"),
    "link": (link, "E-PATH"),
    "point outside": (point_outside, "E-MANIFEST: .*disagree"),
    "unseal": (
        lambda folder: (folder / checkpoint.DIGEST).unlink(),
        "E-MANIFEST: .*sha256sum",
    ),
}


@pytest.mark.parametrize(("damage", "code"), CHANGES.values(), ids=CHANGES)
def test_every_change_is_refused_with_its_code(damage, code, sealed):
    damage(sealed)
    refused(code, checkpoint.verify, sealed)


def test_what_desktops_and_editors_leave_breaks_no_seal_unless_it_is_data(sealed):
    for name in (".DS_Store", ".a.json.swp", "a.json~", "a copy"):
        (sealed / name).touch()
    assert set(checkpoint.verify(sealed)["files"]) == {"a.json", "b.bin"}
    for name in ("._a.json", "a (1).json", "c.bin"):
        (sealed / name).touch()
        refused(f"E-MANIFEST: .*{re.escape(name)}", checkpoint.verify, sealed)
        (sealed / name).unlink()


def test_a_sealed_file_may_have_any_name(tmp_path):
    with checkpoint.building(tmp_path / "done") as stage:
        (stage / "my notes~").touch()
    assert set(checkpoint.verify(tmp_path / "done")["files"]) == {"my notes~"}
    (tmp_path / "done" / "my notes~").unlink()
    refused("E-MANIFEST: .*my notes~", checkpoint.verify, tmp_path / "done")


def test_a_commit_never_replaces_what_is_there(sealed, tmp_path):
    with pytest.raises(OSError), checkpoint.building(sealed):
        pass
    assert (sealed / "b.bin").read_bytes() == b"abc"
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_a_fingerprint_is_the_one_worked_out_by_hand_and_tells_bits_dtypes_and_names():
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
        model.bias.copy_(torch.tensor([3.0]))
    expected = hashlib.sha256()
    expected.update(b"bias (1,) torch.float32\n" + bytes.fromhex("00004040"))
    expected.update(
        b"weight (1, 2) torch.float32\n" + bytes.fromhex("0000803f00000040")
    )
    assert fingerprint(model) == expected.hexdigest()
    flipped = nn.Sequential(nn.Linear(2, 2))
    renamed = nn.Module()
    renamed.add_module("1", flipped[0])
    first = fingerprint(flipped)
    other = fingerprint(renamed)
    flipped[0].weight.data.view(torch.int32)[0] ^= 1
    assert (
        len({first, other, fingerprint(flipped), fingerprint(flipped.bfloat16())}) == 4
    )


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_same_base_has_the_same_fingerprint_inside_a_peft_wrapper(tiny):
    wrapped = get_peft_model(
        tiny(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    assert fingerprint(wrapped) == fingerprint(tiny())
    copied = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    assert fingerprint(get_peft_model(tiny(), copied)) == fingerprint(tiny())
    with torch.no_grad():
        wrapped.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight[
            0, 0
        ] += 1
    assert fingerprint(wrapped) != fingerprint(tiny())
