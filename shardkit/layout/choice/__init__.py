"""Which layout a model gets: traced or declared, cut over more axes by rules, with factors in the place of weights.

Internal: import from `shardkit`.
"""
