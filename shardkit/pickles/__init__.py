"""Pickles, parsed without executing them: the interpreter, its two policies, and records decoded in columns.

Internal: import from `shardkit`.
"""
