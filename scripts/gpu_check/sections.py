"""The sections in order of worth, and running them one by one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from scripts.gpu_check.record import DONE, Record
from scripts.gpu_check.sizes import Sizes

LOST = 3  # exit code of a child whose device answers no more

# Name → seconds below which it is not begun. Each is a module here with a function run(context).
ORDER: Mapping[str, float] = MappingProxyType(
    {
        "ceilings": 5.0,
        "correctness": 20.0,
        "decode": 15.0,
        "matmul": 10.0,
        "prefill": 10.0,
        "engine": 60.0,
        "sweep": 10.0,
        "baselines": 10.0,
        "peers": 20.0,
    }
)
# Share of the time left that a section may take, so that one does not starve the rest.
SHARES: Mapping[str, float] = MappingProxyType(
    {"correctness": 0.2, "decode": 0.25, "matmul": 0.2, "prefill": 0.15, "engine": 0.6, "sweep": 0.4, "baselines": 0.5}
)


def run_sections(names: Sequence[str], sizes: Sizes, record: Record, deadline: float) -> int:
    """Run these sections. Returns an exit code: 0, or LOST when the device has to be opened anew."""
    from scripts.gpu_check.context import Context, DeviceLost  # imports jax, which the parent process does not need
    from scripts.gpu_check.machine import describe

    record.describe(describe())
    for name in names:
        left = deadline - time.monotonic()
        record.begin(name)
        if left < ORDER[name] * sizes.patience:
            record.end(name, f"skipped: {left:.0f} s left, wanted {ORDER[name]:.0f}")
            continue
        begun = time.monotonic()
        share = 1.0 if sizes.dry else SHARES.get(name, 1.0)
        context = Context(section=name, sizes=sizes, record=record, deadline=begun + left * share)
        run: Callable[[Context], None] = import_module(f"scripts.gpu_check.{name}").run
        try:
            run(context)
        except DeviceLost as lost:
            record.end(name, f"the device was lost: {lost}")
            return LOST
        except Exception as error:  # one section's mistake must not cost the others
            record.end(name, f"failed: {type(error).__name__}: {error}")
            print(f"{name}: {error}", file=sys.stderr)
            continue
        record.end(name, f"{DONE} in {time.monotonic() - begun:.0f} s")
    return 0
