"""From the names that a checkpoint stores to the names that the Hub uses.

Pure: names, shapes and dtypes in, names out; nothing is opened.

Internal: import from `shardkit`.
"""

from __future__ import annotations

from shardkit.keys.base import BaseComparison, compare_with_base
from shardkit.keys.renaming import KeyRule
from shardkit.keys.select import Naming, Selection, Skipped, Stripped, select_model

__all__ = [
    "BaseComparison",
    "KeyRule",
    "Naming",
    "Selection",
    "Skipped",
    "Stripped",
    "compare_with_base",
    "select_model",
]
