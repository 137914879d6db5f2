"""Work configurations for the Hopper kernel, from a table of tiles like the portable kernel's.

Decode tiles are one warpgroup that feeds itself, with several programs on an SM, so that one loads while another
computes. Prefill tiles have a warpgroup that does nothing but load, and two that compute where queries fill 128 rows
without a gap; elsewhere, one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from jaxpaged.pallas_kernels.paged_attention.mosaic.geometry import ROWS, WARPS
from jaxpaged.pallas_kernels.paged_attention.tiles import load_table, work_config_of
from jaxpaged.pallas_kernels.paged_attention.worklist import GpuTile, WorkConfig
from jaxpaged.pallas_kernels.platform import DeviceTarget

TABLE = Path(__file__).with_name("tiles.json")


def hopper_work_config(
    target: DeviceTarget,
    *,
    groups: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: jnp.dtype,
) -> WorkConfig:
    """What plan_attention needs for this kernel, as gpu_work_config says it for the portable one.

    Raises: ValueError for widths beyond the table's, and for a GPU whose number of SMs is not known.
    """
    config = work_config_of(
        load_table(TABLE),
        target,
        groups=groups,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        cache_dtype=cache_dtype,
    )
    assert config.prefill is not None, "the table has both phases"
    return replace(config, prefill=_without_gaps(config.prefill, groups))


def _without_gaps(tile: GpuTile, groups: int) -> GpuTile:
    """The tile, or half of it where a query's heads would straddle two warpgroups."""
    if tile.query_rows == ROWS or ROWS % groups == 0:
        return tile
    return replace(tile, query_rows=ROWS, num_warps=tile.num_warps - WARPS)
