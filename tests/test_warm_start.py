"""A second engine of the same shape takes requests without waiting for all its programs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxpaged.programs import Programs
from jaxpaged.warm_start import WarmStart, processor_name
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

SHAPE = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "warmup": True, "skip_tokenizer_init": True}


def test_the_mark_belongs_to_one_shape(tmp_path: Path) -> None:
    first = WarmStart(tmp_path, "model", 8)
    assert not first.ready
    first.remember()
    assert not first.ready  # what start-up has decided stays
    assert WarmStart(tmp_path, "model", 8).ready
    assert not WarmStart(tmp_path, "model", 9).ready


def test_a_warm_start_answers_like_a_cold_one(tmp_path: Path, monkeypatch) -> None:
    """Waiting for all programs took most of a start whose first request needed two of them."""
    path = tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1)
    cold = small_llm(path, **SHAPE)
    (wanted,) = cold.generate([5, 6, 7], use_tqdm=False)
    monkeypatch.setattr(Programs, "finish", lambda *_: None)  # a warm start must not need it
    warm = small_llm(path, **SHAPE)
    (got,) = warm.generate([5, 6, 7], use_tqdm=False)
    assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert warm.stats()["late_compilations"] == 0
    monkeypatch.undo()
    warm.engine.finish_warm_up()
    assert warm.stats()["programs_ready"] == warm.stats()["programs"]


def test_what_the_disk_has_lost_is_counted(tmp_path: Path) -> None:
    """Compiling for seconds in the middle of requests showed in no figure."""
    path = tiny_checkpoint(tmp_path / "tiny", num_hidden_layers=1)
    cache, old = tmp_path / "cache", jax.config.jax_compilation_cache_dir
    try:
        compilation_cache.reset_cache()  # JAX has opened the folder of an earlier engine
        cold = small_llm(path, **SHAPE, compilation_cache_dir=str(cache))
        assert cold.stats()["late_compilations"] == 0
        lost = [entry for entry in cache.iterdir() if entry.name.startswith("jit_forward")]
        assert lost
        for entry in lost:
            entry.unlink()
        warm = small_llm(path, **SHAPE, compilation_cache_dir=str(cache))
        warm.engine.finish_warm_up()
        assert warm.stats()["late_compilations"] == 2  # one for each token bucket
    finally:
        jax.config.update("jax_compilation_cache_dir", old)
        compilation_cache.reset_cache()


def test_the_processor_is_named_with_its_abilities() -> None:
    """A folder that two machines share said that all was there, and each program was compiled during requests."""
    name = processor_name(jax.devices()[0])
    assert len(name.split()) > 3
    other = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    assert processor_name(other).startswith("NVIDIA H200")
