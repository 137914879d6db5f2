"""Helpers for tests: tiny checkpoints and tokenizers made on the spot."""
