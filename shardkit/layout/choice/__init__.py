"""Choose the layout of a model: traced or declared, and cut over tensor- and expert-parallel axes by rules.

Internal: import from `shardkit`.
"""
