"""Which rank holds which region of which tensor: wrap policies, traced from the real model or declared.

Internal: import from `shardkit`.
"""
