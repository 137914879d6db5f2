"""Decode attention: each kernel over batch and context, as a share of the measured bandwidth."""

from __future__ import annotations

from typing import Any

from scripts.gpu_check import attention
from scripts.gpu_check.context import Context, timed

L2_BYTES = 64 << 20  # what fits into the second-level cache is read from there again: faster than memory


def run(context: Context) -> None:
    for rows, length in context.sizes.decode:
        for block_size in context.sizes.decode_blocks:
            for name in attention.KERNELS:
                facts = {"kernel": name, "rows": rows, "context": length, "block": block_size}

                def measure(name=name, rows=rows, length=length, block_size=block_size) -> dict[str, Any]:
                    case = attention.make(context.sizes, name, rows=rows, new=1, context=length, block_size=block_size)
                    return time_decode(context, case, name)

                context.case(facts, measure, seconds=6.0)


def time_decode(context: Context, case: attention.Timed, name: str) -> dict[str, Any]:
    """Microseconds of one call, and its rate of reading keys and values."""
    step = case.step(name, interpret=context.sizes.dry)
    seconds = timed(step, case.q, *case.constants, repeats=context.sizes.repeats, rounds=context.sizes.rounds)
    rate = case.kv_bytes / seconds
    return {
        "microseconds": seconds * 1e6,
        "gb_per_second": rate / 1e9,
        "share_of_copy": context.share("copy_bytes_per_second", rate),
        "share_of_read": context.share("read_bytes_per_second", rate),
        "in_l2": case.kv_bytes < L2_BYTES,
    }
