"""Both prefix caches, for the tests that say so."""

from __future__ import annotations

import pytest

from tests.core import harness


@pytest.fixture(params=["hash", "radix"])
def prefix_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs twice: `make_engine` builds engines with the chain of hashes, then with the tree."""
    monkeypatch.setitem(harness.DEFAULTS, "prefix_cache", request.param)
    return str(request.param)
