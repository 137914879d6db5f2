"""Counters of the scheduler, as one frozen reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """A reading of the scheduler's gauges (now, peak) and counters (since it was made)."""

    num_running: int
    num_waiting: int  # includes preempted requests
    num_blocks: int  # usable blocks: the trash block is not counted
    blocks_used: int  # held by at least one running request now
    blocks_used_peak: int  # highest blocks_used after any step
    blocks_shared: int  # held by more than one running request now
    blocks_shared_peak: int
    blocks_reused: int  # times a request took over a computed block (prefix cache or sibling) at admission
    preemptions: int
    prefix_queries: int  # tokens of admitted requests looked up in the prefix cache
    prefix_hits: int  # tokens of them found there
