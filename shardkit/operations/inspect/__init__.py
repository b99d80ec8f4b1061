"""What a checkpoint holds, from its headers alone."""
