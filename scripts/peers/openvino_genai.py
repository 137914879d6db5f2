"""Benchmark adapter: OpenVINO GenAI's continuous batching pipeline (paged attention) on the CPU.

Options: precision (INFERENCE_PRECISION_HINT: f32, bf16 or f16), max_num_batched_tokens, max_num_seqs, cache_gb.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai

from scripts.peers.protocol import Answer, Job, Request, adapter_main


class OpenVino:
    """add_request() and step() of a ContinuousBatchingPipeline."""

    def __init__(self, job: Job) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = job.options["max_num_batched_tokens"]
        scheduler.max_num_seqs = job.options["max_num_seqs"]
        scheduler.cache_size = job.options["cache_gb"]
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        precision = job.options["precision"]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": job.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)
        self._next_id = 0

    def generate(self, requests: Sequence[Request]) -> Answer:
        began = time.perf_counter()
        handles = [self._add(request) for request in requests]
        token_ids: list[list[int]] = [[] for _ in requests]
        first: list[float | None] = [None] * len(requests)
        finish: list[float | None] = [None] * len(requests)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - began
            for index, handle in enumerate(handles):
                if finish[index] is None and handle.can_read():
                    new = [token for output in handle.read().values() for token in output.generated_ids]
                    token_ids[index] += new
                    first[index] = now if first[index] is None else first[index]
                    if len(token_ids[index]) >= requests[index].out_len:
                        finish[index] = now
        return Answer(token_ids=token_ids, first_token_s=first, finish_s=finish)

    def _add(self, request: Request) -> openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.out_len
        config.do_sample = False
        config.ignore_eos = True
        self._next_id += 1
        prompt = openvino.Tensor(np.array([request.prompt_ids], np.int64))
        return self._pipeline.add_request(self._next_id, prompt, config)

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("openvino", "openvino-genai")}

    def close(self) -> None:
        """Nothing to do."""


if __name__ == "__main__":
    adapter_main(OpenVino)
