"""From a plan to bytes: threads, bounded memory, digests, what is checked on the way. It decides nothing.

Internal: import from `shardkit`.
"""
