"""Every claim names code that exists."""

import pkgutil

import pytest

from moebook import papers


@pytest.mark.parametrize("name", sorted({claim.function for claim in papers.claims()}))
def test_the_code_that_a_claim_names_exists(name):
    assert callable(pkgutil.resolve_name(name))
