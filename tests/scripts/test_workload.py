"""The benchmark's workloads are the same in every run and have the sizes they promise."""

from __future__ import annotations

import pytest

from scripts.workload import W1_OUTPUT, W1_PROMPT, W1_REQUESTS, W2_OUTPUT, W2_PROMPT, make_workloads


def _encode(text: str) -> list[int]:
    """One token per word, and a second one for words longer than five letters."""
    return [token for word in text.split() for token in ([hash_of(word)] if len(word) < 6 else [hash_of(word), 7])]


def hash_of(word: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 1000


def test_sizes_of_w1_and_w2():
    workloads = make_workloads(_encode, seed=0)
    w1, w2 = workloads["W1"], workloads["W2"]
    assert len(w1) == W1_REQUESTS == 64
    assert all(W1_PROMPT[0] <= len(row.prompt_ids) <= W1_PROMPT[1] for row in w1)
    assert all(W1_OUTPUT[0] <= row.out_len <= W1_OUTPUT[1] for row in w1)
    assert sum(len(row.prompt_ids) for row in w1) == 9936
    assert sum(row.out_len for row in w1) == 4385
    assert [(len(row.prompt_ids), row.out_len) for row in w2] == [(W2_PROMPT, W2_OUTPUT)]


def test_same_seed_same_workload_other_seed_another():
    assert make_workloads(_encode, seed=0) == make_workloads(_encode, seed=0)
    assert make_workloads(_encode, seed=0) != make_workloads(_encode, seed=1)


def test_prompts_differ_from_each_other():
    """Equal beginnings would let a prefix cache skip work that other engines do."""
    rows = make_workloads(_encode, seed=0)["W1"]
    assert len({tuple(row.prompt_ids[:8]) for row in rows}) == len(rows)


def test_a_tokenizer_that_drops_words_is_refused():
    with pytest.raises(ValueError, match="a token or more"):
        make_workloads(lambda text: [1, 2, 3], seed=0)
