"""Engine configuration under vLLM's names: frozen, complete, checked; an unknown keyword is an error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from jaxpaged.keywords import reject_unknown_keywords

DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "dummy")


def _want(ok: bool, name: str, wanted: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name}: wanted {wanted}, got {got!r}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: object, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    _want(_is_integer(value) and value > 0, name, "a positive integer" + (" or None" if optional else ""), value)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. None means: derived from the model or the device at start.

    Sizes are in tokens unless named otherwise. Field names and meanings are vLLM's where it has them.
    """

    model: str  # directory, .gguf file, Hugging Face id, or "demo"
    tokenizer: str | None = None  # where the tokenizer comes from; None: the model
    tokenizer_revision: str | None = None  # branch, tag or commit of the hub id that tokenizer names
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    revision: str | None = None  # of a Hugging Face id
    hf_token: str | None = field(default=None, repr=False)
    download_dir: str | None = None  # Hugging Face cache to use
    load_format: str = "auto"  # dummy: random weights, made on the device; the checkpoint's are not read
    dtype: str = "auto"  # of weights and activations; auto: float32 on CPU, else the checkpoint's
    seed: int = 0  # from which the seeds of requests without one are drawn

    max_model_len: int | None = None  # longest sequence; None: the model's own limit, less if memory is short
    block_size: int = 16  # tokens of a KV block
    gpu_memory_utilization: float = 0.9  # share of the device's memory the engine may use
    kv_cache_memory_bytes: int | None = None  # size of the KV cache; goes before gpu_memory_utilization
    num_gpu_blocks_override: int | None = None  # number of KV blocks; goes before both
    kv_cache_dtype: str = "auto"  # auto: as dtype
    enable_prefix_caching: bool = True

    max_num_seqs: int | None = None  # sequences running at once; None: 64 on CPU, else 256
    max_num_batched_tokens: int | None = None  # of a step; None: 512 on CPU, else 2048 (batch_invariant: max_num_seqs)
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True  # run-ahead: dispatch step k+1 before reading step k's tokens
    batch_invariant: bool = False  # answers are bit for bit those that a request gets alone, at a price
    max_num_queued_reqs: int | None = None  # AsyncLLM: sequences that may wait besides max_num_seqs; None: any number
    stream_interval: int = 1  # tokens between two outputs of a streamed request; the first and the last come at once
    max_logprobs: int = 20  # most alternatives a request may ask for

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str | None = None  # "int8": weights; "int8_w8a8": activations too, where they stand it
    attention_backend: str = "auto"  # implementation of pallas_kernels.paged_attention
    matmul_backend: str = "auto"  # implementation of pallas_kernels.dense_matmul, for products with weights

    compilation_cache_dir: str | None = None  # None: jaxpaged's own under the user's cache directory
    warmup: bool = True  # compile every program at start; False: each at first use
    disable_log_stats: bool = True  # False: a line of figures every ten seconds, at logging's level INFO
    use_tqdm_on_load: bool = True  # progress bars while loading and compiling

    @classmethod
    def create(cls, model: str, **kwargs: Any) -> EngineConfig:
        """EngineConfig(model=…, **kwargs) that names the nearest keyword when one is unknown.

        Raises: TypeError for an unknown keyword, ValueError for a bad value.
        """
        reject_unknown_keywords("LLM", kwargs, [f.name for f in dataclasses.fields(cls)])
        return cls(model=model, **kwargs)

    def __post_init__(self) -> None:
        _want(isinstance(self.model, str) and bool(self.model), "model", "a path or model name", self.model)
        texts = ("tokenizer", "tokenizer_revision", "revision", "hf_token", "download_dir", "compilation_cache_dir")
        for name in texts:
            value = getattr(self, name)
            _want(value is None or (isinstance(value, str) and bool(value)), name, "a non-empty string or None", value)
        for name in (f.name for f in dataclasses.fields(self) if f.type == "bool"):
            _want(isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name))
        _want(self.load_format in LOAD_FORMATS, "load_format", f"one of {LOAD_FORMATS}", self.load_format)
        _want(self.dtype in DTYPES, "dtype", f"one of {DTYPES}", self.dtype)
        _want(self.kv_cache_dtype in DTYPES, "kv_cache_dtype", f"one of {DTYPES}", self.kv_cache_dtype)
        _want(self.scheduling_policy in POLICIES, "scheduling_policy", f"one of {POLICIES}", self.scheduling_policy)
        _want(_is_integer(self.seed) and self.seed >= 0, "seed", "an integer of 0 or more", self.seed)
        _want(_is_integer(self.max_logprobs) and self.max_logprobs >= 0, "max_logprobs", "0 or more", self.max_logprobs)
        _positive("block_size", self.block_size)
        _want(self.block_size & (self.block_size - 1) == 0, "block_size", "a power of two", self.block_size)
        for name in ("kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"):
            _positive(name, getattr(self, name), optional=True)
        for name in ("max_model_len", "num_gpu_blocks_override"):  # room for an output; a block beside the trash block
            value = getattr(self, name)
            _want(value is None or (_is_integer(value) and value >= 2), name, "an integer of 2 or more, or None", value)
        queued = self.max_num_queued_reqs
        _want(
            queued is None or (_is_integer(queued) and queued >= 0), "max_num_queued_reqs", "0 or more, or None", queued
        )
        _positive("stream_interval", self.stream_interval)
        _positive("tensor_parallel_size", self.tensor_parallel_size)
        share = self.gpu_memory_utilization
        _want(isinstance(share, int | float) and 0 < share <= 1, "gpu_memory_utilization", "0 < x <= 1", share)
        _want(
            self.pipeline_parallel_size == 1,
            "pipeline_parallel_size",
            "1 (stages are not built yet)",
            self.pipeline_parallel_size,
        )
        _want(
            self.quantization in (None, "int8", "int8_w8a8"),
            "quantization",
            "None, 'int8' (weights) or 'int8_w8a8' (weights and activations)",
            self.quantization,
        )
