"""What a job calls beside the three phases: diagnosis, gradients, optimizers, FSDP1, and torch's own reader and state dicts.

Internal: import from `shardkit`.
"""
