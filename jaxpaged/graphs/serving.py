"""The engine's own programs for a GPU that is absent: drawn from a model's config, compiled one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.blueprint import Blueprint, draw_blueprint
from jaxpaged.config import EngineConfig
from jaxpaged.graphs.report import CompileReport
from jaxpaged.graphs.target import Target
from jaxpaged.models.config import ModelConfig
from jaxpaged.programs import Recipe
from jaxpaged.recipes import COPY, SamplerKey


@dataclass(frozen=True, kw_only=True)
class _AbsentDevice:
    """What sizing an engine asks of a device: all of its memory is free."""

    memory: int
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.memory, "bytes_in_use": 0}


@dataclass(frozen=True, kw_only=True)
class ServingPrograms:
    """Every program that the engine compiles at start; made by `serving_programs`."""

    target: Target
    blueprint: Blueprint
    recipes: Mapping[str, Recipe]  # by name, such as "forward 256", "sample 32 greedy", "copy"

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


def serving_programs(model: Mapping[str, Any], target: Target, **options: Any) -> ServingPrograms:
    """The programs of an engine of this model on this GPU, tensor-parallel over all of the target's devices.

    model: the content of a Hugging Face config.json. options: EngineConfig's fields. No weight is read or made.

    Raises: ValueError for a model that is not supported or does not fit, TypeError for an unknown option.
    """
    config = EngineConfig.create("absent", **{"tensor_parallel_size": target.devices, **options})
    if config.tensor_parallel_size != target.devices:
        raise ValueError(
            f"tensor_parallel_size: wanted the target's {target.devices} devices, got {config.tensor_parallel_size}"
        )
    device = _AbsentDevice(memory=target.spec.memory_bytes)
    blueprint = draw_blueprint(config, ModelConfig.from_hf(dict(model), None), device, target.mesh)
    recipes = {program_name(key): recipe for key, recipe in blueprint.recipes().all().items()}
    return ServingPrograms(target=target, blueprint=blueprint, recipes=recipes)


def program_name(key: Any) -> str:
    """How a program is called: "forward 256" (tokens), "sample 32 greedy", "sample 8 logprobs banned=128", "copy"."""
    if key == COPY:
        return COPY
    if not isinstance(key, SamplerKey):
        return f"forward {key}"
    words = ["greedy"] * key.greedy + ["logprobs"] * key.logprobs
    return " ".join(["sample", str(key.size), *words, f"banned={key.banned_width}"])
