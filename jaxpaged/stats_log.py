"""A line of figures in the log, every ten seconds while steps are made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL = 10.0  # seconds between two lines, at least
COUNTERS = ("computed_tokens", "output_tokens", "prefix_queries", "prefix_hits", "preemptions")

logger = logging.getLogger(__name__)


class StatsLog:
    """Reads Engine.stats() when a line is due; rates are of the time since the last line."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._last = clock()
        self._before = dict.fromkeys(COUNTERS, 0)

    def after_step(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        """Write a line if ten seconds have passed."""
        now = self._clock()
        seconds = now - self._last
        if seconds < INTERVAL:
            return
        figures = stats()
        grown = {name: figures[name] - self._before[name] for name in COUNTERS}
        self._last, self._before = now, {name: figures[name] for name in COUNTERS}
        logger.info(
            "%.1f s: %.1f tokens/s computed, %.1f tokens/s generated; %d running, %d waiting, %d preempted; "
            "KV blocks %.1f%% used, prefix cache %.1f%% hit",
            seconds,
            grown["computed_tokens"] / seconds,
            grown["output_tokens"] / seconds,
            figures["num_running"],
            figures["num_waiting"],
            grown["preemptions"],
            100 * figures["blocks_used"] / figures["num_blocks"],
            100 * grown["prefix_hits"] / max(1, grown["prefix_queries"]),
        )
