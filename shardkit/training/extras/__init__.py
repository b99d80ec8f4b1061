"""Further functions for a training job: diagnosis, gradients, optimizers, FSDP1, Lightning, and help for stock `dcp`.

Internal: import from `shardkit`.
"""
