"""What differs between two checkpoints, whatever their formats."""
