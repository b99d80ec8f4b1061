"""From a sharded checkpoint to the shards of another mesh."""
