"""The product for CPUs with a tile unit (Intel AMX): float32's accuracy out of products of bfloat16s."""
