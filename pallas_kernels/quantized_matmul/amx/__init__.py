"""Products with int8 weights for CPUs with a tile unit (Intel AMX): integers all the way."""
