"""The product for CPUs, compiled by Numba: what XLA:CPU is slow at with 8 to 512 rows.

What Numba compiles is marked no_type_check: checks at run time, which tests put on every function, cannot be compiled.
"""
