"""Which module and which weight names serve a Hugging Face architecture."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama
from jaxpaged.models.llama_slots import llama_slots
from jaxpaged.models.weights.load import Slot


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family is built: module(config, form, rngs=…) and the slots its parameters are loaded from."""

    module: Callable[..., Any]
    slots: Callable[[ModelConfig], list[Slot]]


_LLAMA = Family(module=Llama, slots=llama_slots)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA,
        "MinistralForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _LLAMA,
    }
)


def family_of(config: ModelConfig) -> Family:
    """The family of config.architecture. ValueError naming the nearest supported ones for an unknown one."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        near = difflib.get_close_matches(config.architecture, FAMILIES, n=3, cutoff=0.0)
        raise ValueError(
            f"architecture {config.architecture!r} is not supported; nearest: {', '.join(near)}; "
            "families are registered in models/registry.py"
        )
    return family
