"""Pickles read without running them: the interpreter, its policies, and records taken in columns.

Internal: import from `shardkit`.
"""
