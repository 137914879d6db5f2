"""Ragged paged attention: one op for decode, chunked prefill and mixed batches."""
