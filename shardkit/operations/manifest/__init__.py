"""A manifest for a checkpoint that somebody else wrote."""
