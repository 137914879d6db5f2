"""Counters of the scheduler, as one frozen reading."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.block_manager import BlockManager
from jaxpaged.roster import Roster


@dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """A reading of the scheduler's gauges (now, peak) and counters (since it was made)."""

    num_running: int
    num_waiting: int  # includes preempted requests
    num_blocks: int  # usable blocks: the trash block is not counted
    blocks_used: int  # held by at least one running request now
    blocks_peak: int  # highest blocks_used after any step
    blocks_shared: int  # held by more than one running request now
    blocks_shared_peak: int
    blocks_reused: int  # times a request took over a computed block (prefix cache or sibling) at admission
    preemptions: int
    prefix_queries: int  # tokens of admitted requests looked up in the prefix cache
    prefix_hits: int  # tokens of them found there


def read_stats(roster: Roster, blocks: BlockManager) -> SchedulerStats:
    """The reading now."""
    return SchedulerStats(
        num_running=len(roster.running),
        num_waiting=len(roster.waiting),
        num_blocks=blocks.num_usable,
        blocks_used=blocks.num_used,
        blocks_peak=blocks.peak_used,
        blocks_shared=blocks.num_shared,
        blocks_shared_peak=blocks.peak_shared,
        blocks_reused=blocks.blocks_reused,
        preemptions=roster.num_preemptions,
        prefix_queries=blocks.prefix_queries,
        prefix_hits=blocks.prefix_hits,
    )
