"""shardkit: move model weights between layouts."""
