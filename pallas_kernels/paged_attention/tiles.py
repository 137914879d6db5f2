"""Tile choices of the GPU kernels: a table of data, and the rules where the table is silent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax.numpy as jnp

from jaxpaged.pallas_kernels.paged_attention.worklist import GpuTile, WorkConfig
from jaxpaged.pallas_kernels.platform import DeviceTarget

MOST_GROWN = 2  # programs on an SM whose tile has grown beyond the table's rows, as registers of compiled ones allow
TABLE = Path(__file__).with_name("tiles.json")  # written by scripts/tune_attention.py


@dataclass(frozen=True, kw_only=True)
class TileEntry:
    """A tile, what it is for, and how it was found."""

    gpu: str  # a device's name, "NVIDIA H200", or a generation's, "sm_90"
    phase: str  # "decode" or "prefill"
    head_dim: int  # for heads up to this width
    block_size: int | None  # None: any
    cache_dtype: str | None  # None: any
    source: str  # "compiled …" (registers and shared memory known, not timed) or "measured …"
    tile: GpuTile


@dataclass(frozen=True, kw_only=True)
class TileQuery:
    """What a tile is wanted for."""

    phase: str
    groups: int
    head_dim: int
    block_size: int
    cache_dtype: jnp.dtype


def load_table(path: Path) -> tuple[TileEntry, ...]:
    """The entries of a table."""
    entries = json.loads(path.read_text("utf-8"))
    return tuple(TileEntry(**{**entry, "tile": GpuTile(**entry["tile"])}) for entry in entries)


def save_table(entries: Sequence[TileEntry], path: Path) -> None:
    """Write a table, an entry a line."""
    lines = ",\n".join("  " + json.dumps(asdict(entry)) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")


def merged(table: Sequence[TileEntry], new: TileEntry) -> tuple[TileEntry, ...]:
    """The table with the entry in the place of the one for the same case, or at its end."""

    def case(entry: TileEntry) -> tuple[object, ...]:
        return entry.gpu, entry.phase, entry.head_dim, entry.block_size, entry.cache_dtype

    kept = [entry for entry in table if case(entry) != case(new)]
    return (*kept, new)


def generation(target: DeviceTarget) -> str:
    """The table's name for GPUs of one kind: those beside the data centre's have 100 KB of shared memory."""
    capability = target.capability or (0, 0)
    if capability[0] == 9:
        return "sm_90"
    if capability[0] in (10, 11):
        return "sm_100"
    return "sm_80" if capability == (8, 0) else "sm_89"


def choose_tile(table: Sequence[TileEntry], target: DeviceTarget, query: TileQuery) -> GpuTile:
    """The tile for a case: of this very device rather than of its generation, then the narrowest entry that holds it.

    Rows grow to a power of two that holds G heads; of such tiles fewer fit an SM. A float32 cache gets half the keys:
    its tiles have twice the size.
    Raises: ValueError when the table has nothing for heads this wide.
    """
    dtype = jnp.dtype(query.cache_dtype)
    fitting = [
        entry
        for entry in table
        if entry.gpu in (target.kind, generation(target))
        and entry.phase == query.phase
        and entry.head_dim >= query.head_dim
        and entry.block_size in (None, query.block_size)
        and entry.cache_dtype in (None, dtype.name)
    ]
    if not fitting:
        widest = max((entry.head_dim for entry in table), default=0)
        raise ValueError(f"attention tiles: wanted head_dim up to {widest} on {target}, got {query}")
    best = min(
        fitting,
        key=lambda e: (e.gpu != target.kind, e.head_dim, e.block_size is None, e.cache_dtype is None),
    ).tile
    if dtype.itemsize == 4:
        best = replace(best, kv=max(16, best.kv // 2))
    rows = 1 << (query.groups - 1).bit_length()
    if rows <= best.query_rows:
        return best
    return replace(best, query_rows=rows, occupancy=min(MOST_GROWN, max(1, best.occupancy - 1)))


def gpu_work_config(
    target: DeviceTarget,
    *,
    groups: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: jnp.dtype,
) -> WorkConfig:
    """What plan_attention needs for the GPU kernels; num_kv_heads are those of one device.

    Raises: ValueError for heads wider than the table's, and for a device whose number of SMs is not known.
    """
    return work_config_of(
        load_table(TABLE),
        target,
        groups=groups,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        cache_dtype=cache_dtype,
    )


def work_config_of(
    table: Sequence[TileEntry],
    target: DeviceTarget,
    *,
    groups: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: jnp.dtype,
) -> WorkConfig:
    """gpu_work_config with a kernel's own table."""
    if target.num_cores is None:
        raise ValueError(f"attention work lists: wanted a GPU whose number of SMs is known, got {target}")
    decode, prefill = (
        choose_tile(
            table,
            target,
            TileQuery(
                phase=phase, groups=groups, head_dim=head_dim, block_size=block_size, cache_dtype=jnp.dtype(cache_dtype)
            ),
        )
        for phase in ("decode", "prefill")
    )
    return WorkConfig(
        groups=groups,
        num_kv_heads=num_kv_heads,
        num_sms=target.num_cores,
        decode=decode,
        prefill=prefill,
    )
