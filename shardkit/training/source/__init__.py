"""Where the weights come from: any checkpoint or Hub model, shards made before, the memory of one rank.

Internal: import from `shardkit`.
"""
