"""A model folder small enough to copy and damage."""

import pytest


@pytest.fixture
def llama(tiny):
    return tiny


@pytest.fixture
def folder(tmp_path, tiny, byte_tokenizer):
    path = tmp_path / "tiny"
    tiny().save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path
