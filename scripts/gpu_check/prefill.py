"""Prefill attention: chunks of one sequence, as a share of the measured rate of matrix products."""

from __future__ import annotations

from typing import Any

from scripts.gpu_check import attention
from scripts.gpu_check.context import Context, timed


def run(context: Context) -> None:
    for new, before in context.sizes.prefill:
        for block_size in context.sizes.decode_blocks:
            for name in attention.KERNELS:
                facts = {"kernel": name, "new_tokens": new, "before": before, "block": block_size}

                def measure(name=name, new=new, before=before, block_size=block_size) -> dict[str, Any]:
                    return _time(context, name, new, before, block_size)

                context.case(facts, measure, seconds=6.0)


def _time(context: Context, name: str, new: int, before: int, block_size: int) -> dict[str, Any]:
    sizes = context.sizes
    num_heads, groups, head_dim = sizes.heads
    case = attention.make(sizes, name, rows=1, new=new, context=before + new, block_size=block_size)
    step = case.step(name, interpret=sizes.dry)
    repeats = max(1, sizes.repeats // 4)
    seconds = timed(step, case.q, *case.constants, repeats=repeats, rounds=sizes.rounds)
    pairs = new * before + new * (new + 1) / 2  # of a query and a key that it sees
    rate = 4 * num_heads * groups * head_dim * pairs / seconds
    return {
        "microseconds": seconds * 1e6,
        "tflops": rate / 1e12,
        "share_of_matmul": context.share("matmul_flops_per_second", rate),
    }
