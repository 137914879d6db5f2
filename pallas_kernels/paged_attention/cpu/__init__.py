"""Paged attention for CPUs, compiled by Numba: what XLA:CPU's small products and gathers are too slow for.

What Numba compiles is marked no_type_check: checks at run time, which tests put on every function, cannot be compiled.
"""
