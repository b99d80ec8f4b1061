"""The tensors of a rank's model, and communication between ranks: agreement, shared listings, pipeline stages.

Internal: import from `shardkit`.
"""
