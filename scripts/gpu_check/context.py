"""What a section works with: sizes, the record, the time left; one case after the other, each allowed to fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu_check.record import Record, Row
from scripts.gpu_check.sizes import Sizes


class DeviceLost(RuntimeError):
    """The device answers no more: after an illegal access nothing in this process works."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One section's view."""

    section: str
    sizes: Sizes
    record: Record
    deadline: float  # of time.monotonic()

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def case(self, facts: Row, run: Callable[[], Row], *, seconds: float) -> Row | None:
        """Record facts | run(), or why there is nothing: too little time for a case of `seconds`, refused, an error.

        Raises: DeviceLost when the device is unusable afterwards.
        """
        if self.seconds_left < seconds * self.sizes.patience:
            self.record.add(self.section, {**facts, "note": f"skipped: {self.seconds_left:.0f} s left"})
            return None
        try:
            row = {**facts, **run()}
        except (ValueError, NotImplementedError) as refusal:
            row = {**facts, "note": f"refused: {_short(refusal)}"}
        except Exception as error:  # whatever a compiler or driver comes up with: the other cases go on
            row = {**facts, "error": f"{type(error).__name__}: {_short(error)}"}
        self.record.add(self.section, row)
        if "error" in row:
            self._probe()
        return row

    def share(self, ceiling: str, rate: float) -> float | None:
        """rate as a share of a ceiling that was measured; None without one."""
        top = self.record.ceilings.get(ceiling)
        return rate / top if top else None

    def _probe(self) -> None:
        try:
            jax.block_until_ready(jnp.ones(8) + 1)
        except Exception as error:
            raise DeviceLost(_short(error)) from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def timed(step: Callable[..., Any], state: Any, *constants: Any, repeats: int, rounds: int) -> float:
    """Seconds of one step: the best of `rounds` runs of one program that does `repeats` steps in a row.

    step(state, *constants) gives the next state, of the same shapes. A barrier keeps XLA from merging the steps, and
    many in one program hide what a launch from Python costs.
    """

    def run(state: Any, *constants: Any) -> Any:
        for _ in range(repeats):
            state = jax.lax.optimization_barrier(step(state, *constants))
        return state

    program = jax.jit(run).lower(state, *constants).compile()
    jax.block_until_ready(program(state, *constants))
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(program(state, *constants))
        best = min(best, time.perf_counter() - begun)
    return best / repeats


def waves(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Numbers between -1 and 1 that differ everywhere, made on the device without temporaries."""

    def make() -> jax.Array:
        phase = jnp.zeros(shape, jnp.float32)
        for axis, factor in zip(range(len(shape)), (1.37, 2.11, 0.73, 3.19, 0.31), strict=False):
            phase += jax.lax.broadcasted_iota(jnp.float32, shape, axis) * factor
        return jnp.sin(phase).astype(dtype)

    return jax.jit(make)()
