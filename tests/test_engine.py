"""The engine end to end on a tiny checkpoint: the smallest things that must work."""

from __future__ import annotations

import pytest

from jaxpaged import SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return small_llm(tiny_checkpoint(tmp_path_factory.mktemp("tiny")), skip_tokenizer_init=True)


def test_results_come_in_input_order_and_blocks_come_back(llm):
    prompts = [[7, 8, 9], [1], list(range(40)), [5, 5]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert llm.stats()["blocks_used"] == 0 and llm.engine.num_unfinished == 0
    llm.engine.check_invariants()


def test_samples_of_one_request_differ_and_share_the_prompt(llm):
    """Copy-on-write: the samples write into a prompt block that they share, without seeing each other."""
    params = SamplingParams(n=4, seed=3, max_tokens=8)
    before = llm.stats()["blocks_reused"]
    (output,) = llm.generate([list(range(100, 110))], params, use_tqdm=False)
    texts = [tuple(sample.token_ids) for sample in output.outputs]
    assert len(set(texts)) == 4
    assert llm.stats()["blocks_reused"] > before
    for index, text in enumerate(texts):
        alone = SamplingParams(seed=3 + index, max_tokens=8)
        (again,) = llm.generate([list(range(100, 110))], alone, use_tqdm=False)
        assert tuple(again.outputs[0].token_ids) == text


def test_stream_gives_the_same_tokens(llm):
    (whole,) = llm.generate([[4, 2]], GREEDY, use_tqdm=False)
    stream = llm.generate_stream([4, 2], GREEDY)
    assert [token for output in stream for token in output.outputs[0].token_ids] == whole.outputs[0].token_ids


def test_closing_a_stream_frees_its_blocks(llm):
    stream = llm.generate_stream([4, 2], SamplingParams(temperature=0.0, max_tokens=100))
    next(stream)
    stream.close()
    assert llm.engine.num_unfinished == 0 and llm.stats()["blocks_used"] == 0
