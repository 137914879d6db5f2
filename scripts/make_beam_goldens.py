"""Make the golden beam searches that tests compare with: Hugging Face transformers, float32, eager attention.

Runs in a Python 3.12 that has torch and transformers (and numpy, safetensors, tokenizers), from the project's root:

    PYTHON -m scripts.make_beam_goldens --model DIR --out tests/goldens/beams.json

DIR is the demo model's Hugging Face directory. Cases that float64 decides otherwise, or whose scores are too close to
call, are left out. tests/support/beam_goldens.py documents the file and reads it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.goldens import weights_digest
from tests.support.tiny import tiny_checkpoint

MIN_GAP = 1e-4  # between the scores of two hypotheses
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "one-kv-head": {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64},
}
TEXTS = ("The capital of France is", "Once upon a time, there was a little")


def load_model(path: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def search(model: Any, prompt_ids: Sequence[int], asks: Mapping[str, Any]) -> tuple[list[list[int]], list[float]]:
    """Generated ids and score of every hypothesis, best first."""
    found = model.generate(
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        num_beams=asks["beam_width"],
        num_return_sequences=asks["beam_width"],
        max_new_tokens=asks["max_tokens"],
        length_penalty=asks["length_penalty"],
        early_stopping=asks["early_stopping"],
        eos_token_id=asks["ending_ids"] or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (found.beam_indices >= 0).sum(1).tolist()
    generated = found.sequences[:, len(prompt_ids) :].tolist()
    ids = [row[:length] for row, length in zip(generated, lengths, strict=True)]
    return ids, found.sequences_scores.tolist()


def settings() -> Iterator[dict[str, Any]]:
    """Widths, penalties and rules for stopping that interact."""
    for width, penalty, early in itertools.product((2, 3, 4), (0.0, 1.0, 2.0, -1.0), (False, True, "never")):
        yield {"beam_width": width, "max_tokens": 12, "length_penalty": penalty, "early_stopping": early}
    yield {"beam_width": 8, "max_tokens": 20, "length_penalty": 1.0, "early_stopping": False}


def golden(models: Sequence[Any], prompt_ids: Sequence[int], asks: Mapping[str, Any]) -> dict[str, Any] | None:
    """One search by the first model; None if the second does not agree or scores are close."""
    ids, scores = search(models[0], prompt_ids, asks)
    if search(models[1], prompt_ids, asks)[0] != ids or (-np.diff(scores) < MIN_GAP).any():
        return None
    return {**asks, "prompt_ids": list(prompt_ids), "token_ids": ids, "scores": [round(score, 6) for score in scores]}


def tiny_goldens() -> Iterator[dict[str, Any]]:
    """A checkpoint with its searches. What ends a hypothesis are tokens that would be generated without it."""
    for seed, (name, config) in enumerate(MODELS.items()):
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_checkpoint(Path(folder) / name, seed=seed, **config)
            models = [load_model(path, dtype) for dtype in (torch.float32, torch.float64)]
            digest = weights_digest(path)
        rng, found = np.random.default_rng(seed), []
        for index, asks in enumerate(settings()):
            prompt_ids = rng.integers(0, 1024, (1, 5, 9, 17)[index % 4]).tolist()
            free, _ = search(models[0], prompt_ids, {**asks, "ending_ids": []})
            first = [] if index % 3 == 0 else [free[0][3]]
            second = [free[-1][5]] if index % 3 == 2 else []
            found.append(golden(models, prompt_ids, {**asks, "ending_ids": sorted({*first, *second})}))
        kept = [one for one in found if one is not None]
        print(f"{name}: {len(kept)} of {len(found)} searches")
        yield {"name": name, "seed": seed, "config": config, "weights_sha256": digest, "searches": kept}


def demo_goldens(directory: Path) -> list[dict[str, Any]]:
    """Searches with the demo model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    models = [load_model(directory, dtype) for dtype in (torch.float32, torch.float64)]
    found = []
    for text, early in itertools.product(TEXTS, (False, True)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        asks = {
            "beam_width": 4,
            "max_tokens": 16,
            "length_penalty": 1.0,
            "early_stopping": early,
            "ending_ids": [tokenizer.encode(".", add_special_tokens=False)[0]],
        }
        found.append(golden(models, ids, asks))
    kept = [one for one in found if one is not None]
    print(f"demo: {len(kept)} of {len(found)} searches")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of the demo model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    result = {"about": about, "tiny": list(tiny_goldens()), "demo": demo_goldens(options.model)}
    options.out.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
