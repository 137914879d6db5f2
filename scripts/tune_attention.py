"""Time attention tiles on the GPU at hand and write the best of each case into the table that the kernels read.

    python -m scripts.tune_attention --head-dim 128 --block-size 16 64 --cache-dtype bfloat16 int8
    python -m scripts.tune_attention --dry-run --table /tmp/tiles.json    # every line, on CPU, tiny shapes

Each case and phase is one workload: decoding rows of one length, or chunks of a long prompt. A candidate that does not
compile, or differs from the first that did by more than rounding, is reported and left out.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.pallas_kernels import (
    NO_EXTRAS,
    AttentionExtras,
    AttentionSpec,
    GpuTile,
    TileConfig,
    WorkConfig,
    paged_attention,
    plan_attention,
)
from jaxpaged.pallas_kernels.paged_attention.tiles import TABLE, TileEntry, load_table, merged, save_table
from jaxpaged.pallas_kernels.platform import DeviceTarget, current_target

UNUSED = TileConfig(decode_lanes=1, decode_kv=16, prefill_queries=16, prefill_kv=16)  # of the XLA implementation
LARGEST_DIFFERENCE = 5e-2  # between two tiles' outputs, in shares of the largest value; bfloat16 rounding is below it


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a tile is timed on."""

    phase: str
    rows: int
    queries: int  # of each row
    keys: int  # of each row
    kv_heads: int
    groups: int
    head_dim: int
    block_size: int
    cache_dtype: str

    @property
    def bytes(self) -> int:
        """Keys and values read once, scales included."""
        scales = 4 if self.quantised else 0
        per_token = self.head_dim * jnp.dtype(self.cache_dtype).itemsize + scales
        return 2 * self.rows * self.keys * self.kv_heads * per_token

    @property
    def flops(self) -> int:
        """Of both products, keys after a query left out."""
        pairs = self.rows * (self.queries * self.keys - self.queries * (self.queries - 1) // 2)
        return 4 * pairs * self.kv_heads * self.groups * self.head_dim

    @property
    def quantised(self) -> bool:
        return self.cache_dtype in ("int8", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One candidate's result."""

    tile: GpuTile
    seconds: float


def candidates(phase: str, groups: int, dry_run: bool) -> Iterator[GpuTile]:
    """Tiles worth trying; those beyond the GPU's registers or shared memory fail to compile, or are slow."""
    least = max(16, 1 << (groups - 1).bit_length())
    rows = (least, 2 * least) if phase == "decode" else (64, 128)
    choices: Sequence[Sequence[int]] = (rows, (32, 64, 128), (4, 8), (3, 5), (1, 2, 3))
    if dry_run:
        choices = (rows[:1], (16, 32), (4,), (2,), (1,))
    for query_rows, kv, num_warps, num_stages, occupancy in itertools.product(*choices):
        if query_rows * kv >= 16 * 32 * num_warps or dry_run:  # a warp has a matrix product of its own
            yield GpuTile(query_rows=query_rows, kv=kv, num_warps=num_warps, num_stages=num_stages, occupancy=occupancy)


def arrays(load: Workload) -> tuple[Any, ...]:
    """q, k_cache, v_cache and extras, made on the device."""
    per_row = -(-load.keys // load.block_size)
    shape = (load.rows * per_row + 1, load.kv_heads, load.block_size, load.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = jnp.bfloat16 if load.quantised else jnp.dtype(load.cache_dtype)
    q = jax.random.normal(keys[0], (load.rows * load.queries, load.kv_heads, load.groups, load.head_dim), dtype)
    caches = [jax.random.normal(key, shape, dtype) for key in keys[1:]]
    if not load.quantised:
        return q, *caches, NO_EXTRAS
    scale = jnp.full(shape[:3], 1 / 32, jnp.float32)
    stored = [jnp.clip(cache * 32, -127, 127).astype(load.cache_dtype) for cache in caches]
    return q, *stored, AttentionExtras(k_scale=scale, v_scale=scale)


def batch_of(load: Workload, tile: GpuTile, num_sms: int) -> Any:
    """All rows alike, their blocks in random order."""
    per_row = -(-load.keys // load.block_size)
    blocks = np.random.default_rng(0).permutation(np.arange(1, load.rows * per_row + 1, dtype=np.int32))
    work = WorkConfig(groups=load.groups, num_kv_heads=load.kv_heads, num_sms=num_sms, decode=tile, prefill=None)
    return jax.device_put(
        plan_attention(
            block_tables=blocks.reshape(load.rows, per_row),
            kv_lens=np.full(load.rows, load.keys, np.int32),
            query_starts=np.arange(load.rows + 1, dtype=np.int32) * load.queries,
            num_rows=load.rows,
            num_tokens=load.rows * load.queries,
            tiles=UNUSED,
            work=work,
        )
    )


def time_calls(call: Callable[[], jax.Array], repeats: int, calls: int) -> float:
    """Seconds of one call: the median of `repeats` runs of `calls` calls without waiting in between."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times)


def tune(load: Workload, target: DeviceTarget, *, dry_run: bool, seconds: float) -> Timing | None:
    """The fastest candidate found within about `seconds`; None when none works."""
    q, k, v, extras = arrays(load)
    spec = AttentionSpec(scale=load.head_dim**-0.5, window=None, soft_cap=None)
    run = jax.jit(partial(paged_attention, spec=spec, implementation="triton", interpret=dry_run))
    expected, best = None, None
    deadline = time.monotonic() + seconds
    for tile in candidates(load.phase, load.groups, dry_run):
        if time.monotonic() > deadline:
            print(f"  out of time: the candidates from {tile} on were not tried", flush=True)
            break
        batch = batch_of(load, tile, target.num_cores or 1)
        call = partial(run, q, k, v, batch, extras=extras)
        try:
            out = np.asarray(call(), np.float32)
        except Exception as error:  # whatever the compiler raises: this candidate does not work here
            print(f"  {tile}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        expected = out if expected is None else expected
        difference = np.abs(out - expected).max() / np.abs(expected).max()
        if not difference <= LARGEST_DIFFERENCE:
            print(f"  {tile}: WRONG, differs by {difference:.2g}", flush=True)
            continue
        took = time_calls(call, repeats=1 if dry_run else 5, calls=1 if dry_run else 20)
        if best is None or took < best.seconds:
            best = Timing(tile=tile, seconds=took)
            rates = f"{load.bytes / took / 1e9:.4g} GB/s, {load.flops / took / 1e12:.4g} TFLOP/s"
            print(f"  {tile}: {took * 1e6:.1f} µs, {rates}", flush=True)
    return best


def workloads(args: argparse.Namespace) -> Iterator[Workload]:
    """Every case asked for, both phases."""
    for head_dim, block_size, cache_dtype in itertools.product(args.head_dim, args.block_size, args.cache_dtype):
        for phase in args.phase:
            rows, queries, keys = (64, 1, 8192) if phase == "decode" else (2, 2048, 8192)
            if args.dry_run:
                rows, queries, keys = (2, 1, 40) if phase == "decode" else (1, 20, 40)
            yield Workload(
                phase=phase,
                rows=rows,
                queries=queries,
                keys=keys,
                kv_heads=1 if args.dry_run else args.kv_heads,
                groups=args.groups,
                head_dim=head_dim,
                block_size=block_size,
                cache_dtype=cache_dtype,
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to update")
    parser.add_argument("--phase", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[128])
    parser.add_argument("--block-size", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--cache-dtype", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="for each case and phase")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes in the interpreter; write nothing measured")
    args = parser.parse_args(argv)
    if args.dry_run and args.table == TABLE:
        parser.error("--dry-run needs a --table of its own: what it finds says nothing about a GPU")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    target = current_target()
    if target.platform != "gpu" and not args.dry_run:
        raise SystemExit(f"tuning needs a GPU, got {target}; --dry-run runs anywhere")
    if not args.table.exists():
        shutil.copyfile(TABLE, args.table)
    day = datetime.datetime.now(datetime.UTC).date()
    for load in workloads(args):
        print(load, flush=True)
        best = tune(load, target, dry_run=args.dry_run, seconds=args.seconds)
        if best is None:
            continue
        entry = TileEntry(
            gpu=target.kind,
            phase=load.phase,
            head_dim=load.head_dim,
            block_size=load.block_size,
            cache_dtype=load.cache_dtype,
            source="dry run" if args.dry_run else f"measured {day}, {best.seconds * 1e6:.1f} µs",
            tile=best.tile,
        )
        save_table(merged(load_table(args.table), entry), args.table)


if __name__ == "__main__":
    main()
