"""TINY models as opened GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.weights.gguf import GGUFSource
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_config, tiny_tensors


def tiny_model(seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = tiny_config(**overrides)
    return config, tiny_tensors(config, seed=seed)


def opened_gguf(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], **options: Any) -> GGUFSource:
    return GGUFSource(write_gguf(path / "tiny.gguf", config, tensors, **options))


def model_config_of(source: GGUFSource) -> ModelConfig:
    return ModelConfig.from_hf(source.config_dict(), source.generation_config())
