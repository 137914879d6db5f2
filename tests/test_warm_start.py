"""A second engine of the same shape takes requests without waiting for all its programs."""

from __future__ import annotations

from pathlib import Path

from jaxpaged.programs import Programs
from jaxpaged.warm_start import WarmStart
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
