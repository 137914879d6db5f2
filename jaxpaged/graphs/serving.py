"""The engine's own programs for a GPU that is absent: drawn from a model's config, compiled one by one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.blueprint import Blueprint, draw_blueprint
from jaxpaged.config import EngineConfig
from jaxpaged.demo import resolve_model
from jaxpaged.graphs.report import CompileReport
from jaxpaged.graphs.specs import GpuSpec
from jaxpaged.graphs.target import Target
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.weights import open_checkpoint
from jaxpaged.programs import Recipe
from jaxpaged.recipes import COPY, HISTORY, SamplerKey


@dataclass(frozen=True)
class _AbsentDevice:
    """What sizing an engine asks of a device, under jax.Device's names; all of its memory is free."""

    spec: GpuSpec

    @property
    def platform(self) -> str:
        return "gpu"

    @property
    def device_kind(self) -> str:
        return self.spec.device_kind

    @property
    def compute_capability(self) -> str:
        return "{}.{}".format(*self.spec.capability)

    @property
    def core_count(self) -> int:
        return self.spec.num_cores

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.spec.memory_bytes, "bytes_in_use": 0}


@dataclass(frozen=True, kw_only=True)
class ServingPrograms:
    """Every program that the engine compiles at start; made by `serving_programs`."""

    target: Target
    blueprint: Blueprint
    recipes: Mapping[str, Recipe]  # by name, such as "forward 256", "sample 32 greedy", "copy"

    def largest(self) -> list[str]:
        """The widest decode step, the widest mixed step, the greedy sampler of all rows and the block copy."""
        buckets = self.blueprint.spec.buckets
        decode = buckets.for_tokens(min(self.blueprint.limits.max_num_seqs, buckets.tokens[-1]))
        greedy = [name for name in self.recipes if name.startswith(f"sample {buckets.samples[-1]} greedy")]
        return [*dict.fromkeys((f"forward {decode}", f"forward {buckets.tokens[-1]}")), *greedy, COPY]

    def compile(self, name: str, *, timeout: float = 3600.0, dump: Path | None = None) -> CompileReport:
        """This program for the target. Raises: ValueError for an unknown name, CompileError."""
        if name not in self.recipes:
            raise ValueError(f"program: wanted one of {list(self.recipes)}, got {name!r}")
        recipe = self.recipes[name]
        return self.target.compile(
            recipe.function,
            *recipe.arguments,
            donate_argnums=recipe.donate,
            out_shardings=recipe.out_shardings,
            timeout=timeout,
            dump=dump,
        )


def read_model(name: str, *, layers: int | None) -> ModelConfig:
    """The config of a config.json, a directory, a .gguf file or a Hugging Face id; layers: its first ones alone.

    Raises: ValueError for a model that is not supported, or one without that many layers.
    """
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        model = ModelConfig.from_hf(json.loads(file.read_text("utf-8")), None)
    else:
        checkpoint = open_checkpoint(resolve_model(name), revision=None, token=None, download_dir=None)
        checkpoint.source.close()
        model = checkpoint.config
    if layers is None:
        return model
    if not 1 <= layers <= model.num_layers:
        raise ValueError(f"layers: wanted 1 to the model's {model.num_layers}, got {layers}")
    return dataclasses.replace(model, num_layers=layers, windows=model.windows[:layers])


def serving_programs(model: ModelConfig | Mapping[str, Any], target: Target, **options: Any) -> ServingPrograms:
    """The programs of an engine of this model on this GPU, tensor-parallel over all of the target's devices.

    model: its config, or the content of its Hugging Face config.json. options: EngineConfig's fields. No weight is
    read or made.

    Raises: ValueError for a model that is not supported or does not fit, TypeError for an unknown option.
    """
    config = EngineConfig.create("absent", **{"tensor_parallel_size": target.devices, **options})
    if config.tensor_parallel_size != target.devices:
        raise ValueError(
            f"tensor_parallel_size: wanted the target's {target.devices} devices, got {config.tensor_parallel_size}"
        )
    device = _AbsentDevice(target.spec)
    known = model if isinstance(model, ModelConfig) else ModelConfig.from_hf(dict(model), None)
    blueprint = draw_blueprint(config, known, device, target.mesh)
    recipes = {program_name(key): recipe for key, recipe in blueprint.recipes().all().items()}
    return ServingPrograms(target=target, blueprint=blueprint, recipes=recipes)


def program_name(key: Any) -> str:
    """How a program is called: "forward 256" (tokens), "sample 32 greedy", "sample 8 logprobs", "history", "copy"."""
    if key in (COPY, HISTORY):
        return str(key)
    if not isinstance(key, SamplerKey):
        return f"forward {key}"
    words = ["greedy"] * key.greedy + ["logprobs"] * key.logprobs + ["adjusts"] * key.adjusts
    return " ".join(["sample", str(key.size), *words])
