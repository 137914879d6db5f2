"""The committed goldens are whole, and the tiny checkpoints can be made again from their configs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.goldens import CLOSE_CALL, GOLDENS, Golden, check_greedy, load_smollm2, load_tiny, weights_digest
from tests.support.tiny import tiny_checkpoint


def _check_arrays(golden: Golden) -> None:
    steps = len(golden.token_ids)
    assert golden.prompt_ids
    assert golden.top_ids.shape == golden.top_logprobs.shape == (steps, 5)
    np.testing.assert_array_equal(golden.top_ids[:, 0], golden.token_ids)
    np.testing.assert_array_equal(golden.top_logprobs[:, 0], golden.logprobs)
    np.testing.assert_allclose(golden.gaps, golden.top_logprobs[:, 0] - golden.top_logprobs[:, 1], atol=1e-6)
    assert (np.diff(golden.top_logprobs) <= 0).all()
    assert (golden.logprobs <= 0).all()


def test_smollm2_goldens_are_whole():
    goldens = load_smollm2()
    assert len(goldens) >= 24
    assert len({golden.name for golden in goldens}) == len(goldens)
    for golden in goldens:
        _check_arrays(golden)
        assert len(golden.token_ids) == 64
    lengths = [len(golden.prompt_ids) for golden in goldens]
    assert min(lengths) == 1
    assert max(lengths) == 700


def test_tiny_goldens_are_whole_and_have_no_close_call():
    for tiny in load_tiny():
        for golden in tiny.goldens:
            _check_arrays(golden)
            assert golden.gaps.min() > CLOSE_CALL


def test_tiny_checkpoints_are_made_again_bit_for_bit(tmp_path: Path):
    """A change of the generator that the goldens were not made again for would look like an engine's fault."""
    for tiny in load_tiny():
        directory = tiny_checkpoint(tmp_path / tiny.name, seed=tiny.seed, **tiny.config)
        assert weights_digest(directory) == tiny.weights_sha256, tiny.name


def test_goldens_are_small():
    assert sum(path.stat().st_size for path in GOLDENS.glob("*.npz")) <= 1 << 20


def test_check_greedy_forgives_only_close_calls():
    golden = load_tiny()[0].goldens[0]
    ids, logprobs = list(golden.token_ids), golden.logprobs.tolist()
    check_greedy(golden, ids, logprobs, tolerance=0)
    with pytest.raises(AssertionError, match="step 3 wanted"):
        check_greedy(golden, [*ids[:3], ids[3] + 1, *ids[4:]], logprobs, tolerance=0)
    with pytest.raises(AssertionError, match="off by"):
        check_greedy(golden, ids, [*logprobs[:5], logprobs[5] + 2e-3, *logprobs[6:]], tolerance=1e-3)
    with pytest.raises(AssertionError, match="tokens"):
        check_greedy(golden, ids[:-1], logprobs[:-1], tolerance=1e-3)
