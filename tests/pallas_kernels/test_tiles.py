"""The table of GPU tiles: what is chosen for a case, and that the tuning script can write it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import graphs
from jaxpaged.pallas_kernels import DeviceTarget, current_target, gpu_work_config
from jaxpaged.pallas_kernels.paged_attention.tiles import (
    TABLE,
    TileEntry,
    TileQuery,
    choose_tile,
    load_table,
    merged,
    save_table,
)
from scripts.tune_attention import main
from tests.support.attention import gpu_tile

H200 = DeviceTarget(platform="gpu", kind="NVIDIA H200", capability=(9, 0), num_cores=132)
QUERY = TileQuery(phase="decode", groups=4, head_dim=96, block_size=16, cache_dtype=jnp.dtype("bfloat16"))
ENTRY = TileEntry(
    gpu="sm_90", phase="decode", head_dim=128, block_size=None, cache_dtype=None, source="test", tile=gpu_tile(kv=64)
)


def test_the_most_specific_entry_wins():
    table = [
        ENTRY,
        replace(ENTRY, head_dim=256, tile=gpu_tile(kv=16)),
        replace(ENTRY, head_dim=64, tile=gpu_tile(kv=16)),
        replace(ENTRY, gpu="sm_80", tile=gpu_tile(kv=16)),
        replace(ENTRY, phase="prefill", tile=gpu_tile(kv=16)),
    ]
    assert choose_tile(table, H200, QUERY) == ENTRY.tile
    table.append(replace(ENTRY, cache_dtype="bfloat16", tile=gpu_tile(kv=128)))
    assert choose_tile(table, H200, QUERY).kv == 128
    assert choose_tile(table, H200, replace(QUERY, cache_dtype=jnp.dtype("int8"))).kv == 64
    table.append(replace(ENTRY, block_size=16, tile=gpu_tile(kv=256)))
    assert choose_tile(table, H200, QUERY).kv == 256
    table.append(replace(ENTRY, gpu="NVIDIA H200", head_dim=256, tile=gpu_tile(kv=512)))
    assert choose_tile(table, H200, QUERY).kv == 512


def test_tiles_follow_heads_and_float32():
    held = replace(ENTRY, tile=replace(ENTRY.tile, occupancy=4))
    for groups, rows, occupancy in ((16, 16, 4), (17, 32, 2), (20, 32, 2)):
        tile = choose_tile([held], H200, replace(QUERY, groups=groups))
        assert (tile.query_rows, tile.occupancy) == (rows, occupancy)
    assert choose_tile([ENTRY], H200, replace(QUERY, groups=20)).occupancy == 1
    assert choose_tile([ENTRY], H200, replace(QUERY, cache_dtype=jnp.dtype("float32"))).kv == 32


def test_wider_heads_than_the_table_has_are_refused():
    with pytest.raises(ValueError, match="up to 128"):
        choose_tile([ENTRY], H200, replace(QUERY, head_dim=512))


@pytest.mark.parametrize("name", ["a100", "l4", "h100", "h200", "b200"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_the_table_serves_every_gpu(name, head_dim):
    with jax.sharding.use_abstract_mesh(graphs.target(name).mesh):
        target = current_target()
    shape = dict(num_kv_heads=8, head_dim=head_dim, block_size=16, cache_dtype=jnp.dtype("bfloat16"))
    config = gpu_work_config(target, groups=4, **shape)
    assert config.num_sms == graphs.target(name).spec.num_cores
    assert config.prefill is not None
    assert config.prefill.query_rows >= 64


def test_work_lists_off_gpus_are_refused():
    with pytest.raises(ValueError, match="SMs"):
        gpu_work_config(
            DeviceTarget(platform="cpu", kind="cpu", capability=None, num_cores=None),
            groups=4,
            num_kv_heads=8,
            head_dim=64,
            block_size=16,
            cache_dtype=jnp.dtype("bfloat16"),
        )


def test_the_table_is_written_as_it_is_read(tmp_path):
    path = tmp_path / "tiles.json"
    table = load_table(TABLE)
    save_table(table, path)
    assert load_table(path) == table
    assert path.read_bytes() == TABLE.read_bytes()
    assert merged([ENTRY], replace(ENTRY, source="new")) == (replace(ENTRY, source="new"),)
    assert len(merged([ENTRY], replace(ENTRY, block_size=16))) == 2


def test_tuning_dry_run_writes_entries(tmp_path, capsys):
    """Every line of the script, in the interpreter with tiny shapes; the table it read is extended."""
    path = tmp_path / "tiles.json"
    main(["--dry-run", "--table", str(path), "--head-dim", "16", "--block-size", "16", "--cache-dtype", "int8"])
    added = load_table(path)[len(load_table(TABLE)) :]
    assert [(entry.gpu, entry.phase, entry.head_dim, entry.source) for entry in added] == [
        ("cpu", "decode", 16, "dry run"),
        ("cpu", "prefill", 16, "dry run"),
    ]
    assert "WRONG" not in capsys.readouterr().out


def test_a_dry_run_spares_the_real_table(capsys):
    with pytest.raises(SystemExit):
        main(["--dry-run"])
    assert "--table" in capsys.readouterr().err
