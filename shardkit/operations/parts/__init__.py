"""One job, divided over processes that share a file system: who does what, and what each has finished.

Internal: import from `shardkit`.
"""
