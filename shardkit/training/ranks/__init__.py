"""What a rank holds, what it tells the others, and what the phases hand on.

Internal: import from `shardkit`.
"""
