"""Decode tiles of the portable kernel: keys per iteration × loads in flight × programs that share an SM.

First what the list for rows of many queries costs steps that have none: a program of its own would spare them that.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from jaxpaged.pallas_kernels import GpuTile
from scripts.gpu_check import attention
from scripts.gpu_check.context import Context
from scripts.gpu_check.decode import time_decode


def run(context: Context) -> None:
    sizes = context.sizes
    rows, length = sizes.lists
    for name, both in product(attention.KERNELS, (False, True)):
        facts = {"kernel": name, "rows": rows, "context": length, "block": sizes.decode_blocks[0], "lists": 1 + both}
        context.case(facts, partial(_time_lists, context, name, both), seconds=5.0)
    for (rows, length), block in product(sizes.sweep, sizes.decode_blocks):
        for kv, stages, occupancy in product(sizes.sweep_kv, sizes.sweep_stages, sizes.sweep_occupancy):
            tile = GpuTile(query_rows=16, kv=kv, num_warps=4, num_stages=stages, occupancy=occupancy)
            facts = {"rows": rows, "context": length, "block": block, "kv": kv, "stages": stages, "split": occupancy}

            def measure(rows=rows, length=length, block=block, tile=tile) -> dict[str, Any]:
                case = attention.make(sizes, "triton", rows=rows, new=1, context=length, block_size=block, decode=tile)
                return time_decode(context, case, "triton")

            context.case(facts, measure, seconds=5.0)


def _time_lists(context: Context, name: str, both: bool) -> dict[str, Any]:
    rows, length = context.sizes.lists
    block = context.sizes.decode_blocks[0]
    case = attention.make(context.sizes, name, rows=rows, new=1, context=length, block_size=block, both_lists=both)
    return time_decode(context, case, name)
