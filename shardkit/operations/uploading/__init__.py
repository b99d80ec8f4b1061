"""Writing an output into a store: where it may go, notes of what is finished, the run, its commit.

Internal: import from `shardkit`.
"""
