"""From a Hub model to the shards of every rank."""
