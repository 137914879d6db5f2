"""The model families and how their checkpoints are read."""
