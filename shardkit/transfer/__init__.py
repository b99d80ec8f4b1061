"""Executing a plan: threads, bounded memory, digests, checks of the source. It decides nothing.

Internal: import from `shardkit`.
"""
