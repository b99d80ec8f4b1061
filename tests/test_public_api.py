"""The public names: sorted, complete, importable."""

from __future__ import annotations

import pytest

import shardkit
from shardkit import errors

INTERNAL = {"Terminated"}  # how the command line turns SIGTERM into an exception


def test_all_is_sorted():
    assert shardkit.__all__ == sorted(set(shardkit.__all__))
    assert dir(shardkit) == shardkit.__all__


@pytest.mark.parametrize("name", shardkit.__all__)
def test_each_is_importable(name):
    assert getattr(shardkit, name) is not None


def test_every_error_is_public():
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__ == errors.__name__
    }
    assert raised - INTERNAL <= set(shardkit.__all__)


def test_all_of_training_is_at_the_top():
    from shardkit import training

    assert training.__all__ == sorted(set(training.__all__))
    assert set(training.__all__) <= set(shardkit.__all__)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = shardkit.bogus
