"""Opens a checkpoint, whatever names it: a directory, a GGUF file or a Hugging Face hub id."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.weights.hub import fetch_snapshot, is_hub_id
from jaxpaged.models.weights.load import Slot, ignorable_tensors, load_weights, settle_head
from jaxpaged.models.weights.safetensors import SafetensorsSource
from jaxpaged.models.weights.source import TensorSource

if TYPE_CHECKING:
    from jaxpaged.tokenizer import Tokenizer

__all__ = ["Checkpoint", "Slot", "TensorSource", "ignorable_tensors", "load_weights", "open_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: headers are read and checked, no weight is loaded yet."""

    config: ModelConfig  # tie_word_embeddings already agrees with the tensors present
    source: TensorSource  # the caller closes it
    tokenizer: Callable[[], Tokenizer]  # builds it: slow, so only where text is needed
    generation_config: dict[str, Any]  # empty where the checkpoint has none
    path: Path  # the directory or the .gguf file


def open_checkpoint(
    path_or_id: str, *, revision: str | None, token: str | None, download_dir: str | None
) -> Checkpoint:
    """Open a directory in Hugging Face's layout, a .gguf file, or a hub id (downloaded, or from the cache).

    revision, token and download_dir concern hub ids only. A local path wins over a hub id of the same name.
    Raises ValueError saying what is missing or wrong: the path, the id, config.json, a weight file.
    """
    if not path_or_id:
        raise ValueError("the model must be a directory, a .gguf file or a hub id (owner/name), got an empty string")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path)
        raise ValueError(f"{path} is a file but not a .gguf file; pass the directory that holds config.json")
    if os.path.lexists(path) or not is_hub_id(path_or_id):
        raise ValueError(
            f"model {path_or_id!r} does not exist as a path and is no hub id (owner/name); check the spelling"
        )
    directory = fetch_snapshot(path_or_id, revision=revision, token=token, download_dir=download_dir, weights=True)
    return _open_directory(directory)


def _open_directory(directory: Path) -> Checkpoint:
    config = _read_json(directory / "config.json")
    if config is None:
        raise ValueError(f"{directory} holds no config.json; pass a model directory in Hugging Face's layout")
    generation_config = _read_json(directory / "generation_config.json")
    ModelConfig.from_hf(config, generation_config)  # before the weights: its errors say more
    source = SafetensorsSource(directory)
    if not (config.get("dtype") or config.get("torch_dtype")):
        config = config | {"dtype": source.main_dtype()}

    def tokenizer() -> Tokenizer:
        from jaxpaged.tokenizer import Tokenizer

        return Tokenizer.from_directory(directory)

    return Checkpoint(
        config=settle_head(ModelConfig.from_hf(config, generation_config), source),
        source=source,
        tokenizer=tokenizer,
        generation_config=generation_config or {},
        path=directory,
    )


def _open_gguf(path: Path) -> Checkpoint:
    from jaxpaged.models.weights.gguf import GGUFSource  # the gguf package is needed for such files only

    source = GGUFSource(path)
    generation_config = source.generation_config()

    def tokenizer() -> Tokenizer:
        from jaxpaged.tokenizer import Tokenizer

        return Tokenizer.from_gguf(path)

    return Checkpoint(
        config=ModelConfig.from_hf(source.config_dict(), generation_config),
        source=source,
        tokenizer=tokenizer,
        generation_config=generation_config,
        path=path,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The file's object; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
