"""load_format="dummy": an engine from a config alone, for measurements."""

from __future__ import annotations

import json

import numpy as np
import safetensors.numpy

from jaxpaged import SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_config


def test_random_weights_need_no_tensors_and_follow_the_seed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()), "utf-8")
    safetensors.numpy.save_file({"unused": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    answers = []
    for seed in (0, 0, 1):
        llm = small_llm(tmp_path, load_format="dummy", skip_tokenizer_init=True, seed=seed)
        answers.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]
    assert len(answers[0]) == 6
