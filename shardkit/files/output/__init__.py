"""Where the files of a job go until they are an output: `contract` says how, `local` and `bucket` do it.

Internal: import from `shardkit`.
"""
