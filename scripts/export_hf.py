"""Writes a GGUF checkpoint as a Hugging Face directory in float32, for comparison with other engines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxpaged.gguf_file import read_gguf
from jaxpaged.gguf_tokenizer import build_tokenizer
from jaxpaged.models.weights.gguf import GGUFSource


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(source: GGUFSource, directory: Path) -> None:
    tensors = {name: np.ascontiguousarray(source.read(name)) for name in source.names()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(gguf: Path, directory: Path, max_length: object) -> None:
    tokenizer = build_tokenizer(gguf, read_gguf(gguf).metadata)
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        **tokenizer.special_tokens,
    }
    if isinstance(tokenizer.chat_template, dict):
        config["chat_template"] = [{"name": k, "template": v} for k, v in tokenizer.chat_template.items()]
    elif tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    _write_json(directory / "tokenizer_config.json", config)


def export(gguf: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into directory."""
    directory.mkdir(parents=True, exist_ok=True)
    source = GGUFSource(gguf)
    config = source.config_dict() | {"dtype": "float32"}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", source.generation_config())
    _write_weights(source, directory)
    _write_tokenizer(gguf, directory, config["max_position_embeddings"])
    source.close()


def main() -> None:
    """Command line: export_hf.py model.gguf directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="the GGUF file to read")
    parser.add_argument("directory", type=Path, help="where to write; made when it does not exist")
    options = parser.parse_args()
    export(options.gguf, options.directory)


if __name__ == "__main__":
    main()
