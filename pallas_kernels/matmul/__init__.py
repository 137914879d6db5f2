"""Products of activations and float32 weights."""
