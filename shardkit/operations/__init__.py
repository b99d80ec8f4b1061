"""What people ask for: a folder for each verb, and what the verbs share.

Internal: import from `shardkit`.
"""
