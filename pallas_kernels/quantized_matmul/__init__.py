"""Products of activations with int8 and int4 weights, read as they lie in the checkpoint."""
