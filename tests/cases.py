"""Which cases of a test `make test` runs: one of them, and `make prove` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

COLLECTED = pytest.StashKey[dict[str, bool]]()
"""All tests that were found, before any is left out: whether each is `prove`."""


def but_first(cases: Iterable[Any]) -> list[Any]:
    """Return the cases of `pytest.mark.parametrize`, all but the first marked `prove`."""
    first, *others = cases
    return [
        first,
        *(
            pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.prove)
            for case in others
        ),
    ]
