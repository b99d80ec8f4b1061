"""Pickles, read without being run: the interpreter, its two policies, and records taken in columns.

Internal: import from `shardkit`.
"""
