"""Which engines a benchmark run compares, from its command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Bytes per weight as stored: GGUF's Q8_0 keeps a float16 scale for each 32 weights, OpenVINO's int8 one per row.
_WEIGHT_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "int8": 1.0, "q8_0": 34 / 32, "int4": 0.5, "q4_1": 20 / 32}

_OPENVINO_PRECISION = {"f32": "f32", "f16": "f16", "int8": "f32", "int4": "f32"}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine as the benchmark runs it."""

    name: str
    python: str  # interpreter of its adapter
    module: str  # the adapter
    model: str
    options: Mapping[str, Any]  # the adapter's
    weight_bytes: float  # per weight
    first_requests: Mapping[str, int] = field(default_factory=dict)  # of a workload; absent: all of them
    reference_rank: int = 0  # higher is the better source of reference tokens; 0 is none

    def entry(self) -> dict[str, Any]:
        """The engine's part of a record, before anything has run. Paths are of this machine alone and left out."""
        return {
            "name": self.name,
            "options": {key: value for key, value in self.options.items() if key != "server"},
            "weight_bytes": self.weight_bytes,
            "versions": {},
            "load_s": [],
            "runs": {},
            "error": None,
        }


def engines_from_options(options: argparse.Namespace) -> list[EngineSpec]:
    """The engines that bench.py's command line names, jaxpaged first."""
    specs = [_jaxpaged(options), *_huggingface(options), *_openvino(options), *_llamacpp(options)]
    words = options.engines
    return [spec for spec in specs if words is None or any(word.lower() in spec.name.lower() for word in words)]


def _jaxpaged(options: argparse.Namespace) -> EngineSpec:
    keywords = {name: _json_or_text(value) for name, value in _pairs(options.jaxpaged_option)}
    quantization = keywords.get("quantization")
    dtype = keywords.get("dtype", "float32")
    label = quantization or {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "auto": "f32"}[dtype]
    return EngineSpec(
        name=f"jaxpaged {label}",
        python=sys.executable,
        module="scripts.peers.jaxpaged_engine",
        model=str(options.model),
        options=keywords,
        weight_bytes=_WEIGHT_BYTES.get(label, 1.0),
    )


def _huggingface(options: argparse.Namespace) -> Iterator[EngineSpec]:
    if options.reference_python is None:
        return
    for batch_size, first, rank in ((1, {"W1": options.sequential}, 2), (16, {"W2": 0}, 1)):
        yield EngineSpec(
            name="transformers f32 sequential" if batch_size == 1 else f"transformers f32 static {batch_size}",
            python=options.reference_python,
            module="scripts.peers.huggingface",
            model=str(options.model),
            options={"dtype": "float32", "batch_size": batch_size},
            weight_bytes=4.0,
            first_requests=first,
            reference_rank=rank,
        )


def _openvino(options: argparse.Namespace) -> Iterator[EngineSpec]:
    if options.openvino_python is None:
        return
    for label, model in _pairs(options.openvino_model):
        yield EngineSpec(
            name=f"OpenVINO GenAI {label}",
            python=options.openvino_python,
            module="scripts.peers.openvino_genai",
            model=model,
            options={
                "precision": _OPENVINO_PRECISION[label],
                "max_num_batched_tokens": 256,
                "max_num_seqs": 64,
                "cache_gb": 1,
            },
            weight_bytes=_WEIGHT_BYTES[label],
        )


def _llamacpp(options: argparse.Namespace) -> Iterator[EngineSpec]:
    if options.llama_server is None:
        return
    for label, model in _pairs(options.llama_model):
        yield EngineSpec(
            name=f"llama.cpp {label}",
            python=sys.executable,
            module="scripts.peers.llamacpp",
            model=model,
            options={"server": options.llama_server, "parallel": 64, "context": 64 * 400},
            weight_bytes=_WEIGHT_BYTES[label.lower()],
        )


def _pairs(values: Sequence[str]) -> Iterator[tuple[str, str]]:
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals:
            raise ValueError(f"wanted NAME=VALUE, got {value!r}")
        yield name, rest


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
