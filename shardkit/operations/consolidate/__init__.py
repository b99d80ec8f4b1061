"""From any sharded checkpoint to a Hub model."""
