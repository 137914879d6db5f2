"""jaxpaged: paged, continuously batched LLM inference on JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxpaged.beam_params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jaxpaged.config import EngineConfig
from jaxpaged.demo import DEMO_MODEL
from jaxpaged.errors import EngineDead, QueueFull
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.request import FinishReason
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.structured_params import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxpaged.async_llm import AsyncLLM
    from jaxpaged.engine import Engine
    from jaxpaged.llm import LLM

__all__ = [
    "DEMO_MODEL",
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "FinishReason",
    "Logprob",
    "QueueFull",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "generate",
]


def generate(model: str, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True, **options: Any) -> Any:
    """LLM(model, **options).generate(prompts, sampling_params): the one-call form, which builds the engine each time.

    Returns list[RequestOutput] in input order. Raises as LLM and LLM.generate do.
    """
    from jaxpaged.llm import LLM

    return LLM(model, **options).generate(prompts, sampling_params, use_tqdm=use_tqdm)


def __getattr__(name: str) -> Any:
    """LLM, AsyncLLM and Engine are imported at first use: they bring JAX and Flax, which take a second."""
    if name == "LLM":
        from jaxpaged.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from jaxpaged.async_llm import AsyncLLM

        return AsyncLLM
    if name == "Engine":
        from jaxpaged.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
