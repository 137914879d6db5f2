"""Make the golden outputs that tests compare with: Hugging Face transformers, float32, eager attention, greedy.

Runs in an interpreter that has torch and transformers (and numpy, safetensors, tokenizers), from the project's root:

    PYTHON -m scripts.make_goldens smollm2 --model DIR --out tests/goldens/smollm2.npz
    PYTHON -m scripts.make_goldens tiny --out tests/goldens/tiny.npz

Each prompt runs alone, with the key/value cache, and is not stopped by end-of-sequence tokens.
tests/support/goldens.py documents the file and reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from scripts.golden_configs import TinyCase, tiny_cases
from scripts.golden_prompts import Prompt, golden_prompts
from tests.support.goldens import weights_digest
from tests.support.tiny import tiny_checkpoint

TOP = 5  # alternatives kept per step
MIN_GAP = 1e-3  # between the two best log-probabilities; tiny prompts with a closer call are drawn again
MAX_DRAWS = 50


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Greedy continuation of one prompt: S steps. float32 but for the ids."""

    prompt_ids: list[int]
    token_ids: np.ndarray  # int32[S]
    logprobs: np.ndarray  # [S], of the chosen tokens
    gaps: np.ndarray  # [S], best log-probability less the second best
    top_ids: np.ndarray  # int32[S, TOP], best first
    top_logprobs: np.ndarray  # [S, TOP]


def load_model(path: Path) -> Any:
    """The model of a Hugging Face directory in float32 with eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def greedy(model: Any, prompt_ids: Sequence[int], steps: int) -> Generated:
    """Generate `steps` tokens greedily with the cache."""
    cache = transformers.DynamicCache(config=model.config)
    tokens = torch.tensor([list(prompt_ids)])
    rows = []
    for _ in range(steps):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0, -1].float()
        rows.append(torch.log_softmax(logits, dim=-1).topk(TOP))
        tokens = rows[-1].indices[:1].reshape(1, 1)
    ids = torch.stack([row.indices for row in rows]).to(torch.int32).numpy()
    logprobs = torch.stack([row.values for row in rows]).numpy()
    return Generated(
        prompt_ids=list(prompt_ids),
        token_ids=ids[:, 0],
        logprobs=logprobs[:, 0],
        gaps=logprobs[:, 0] - logprobs[:, 1],
        top_ids=ids,
        top_logprobs=logprobs,
    )


@torch.no_grad()
def uncached_error(model: Any, generated: Generated) -> float:
    """Largest difference of the chosen tokens' log-probabilities to one forward pass over the whole sequence."""
    sequence = [*generated.prompt_ids, *generated.token_ids.tolist()]
    logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0].float()
    start = len(generated.prompt_ids) - 1
    logprobs = torch.log_softmax(logits[start:-1], dim=-1).numpy()
    return float(np.abs(logprobs[np.arange(len(generated.token_ids)), generated.token_ids] - generated.logprobs).max())


def encode(tokenizer: Any, prompt: Prompt) -> tuple[str, list[int]]:
    """The prompt's text as encoded and its token ids, without added special tokens."""
    text = prompt.text
    if prompt.chat is not None:
        messages = [{"role": role, "content": content} for role, content in prompt.chat]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text is None:
        raise ValueError(f"prompt {prompt.name!r} has neither text nor chat")
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text, ids[: prompt.max_tokens]


def make_smollm2(directory: Path, steps: int) -> tuple[list[Generated], dict[str, Any]]:
    """Goldens of the demo model, and what the file says about them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = load_model(directory)
    rows, prompts = [], []
    for prompt in golden_prompts():
        text, ids = encode(tokenizer, prompt)
        row = greedy(model, ids, steps)
        rows.append(row)
        prompts.append({"name": prompt.name, "text": text, "cut": prompt.max_tokens is not None})
        print(
            f"{prompt.name}: {len(ids)} tokens, least gap {row.gaps.min():.2e}, "
            f"uncached differs by {uncached_error(model, row):.1e}: "
            f"{tokenizer.decode(row.token_ids)[:60]!r}",
            flush=True,
        )
    return rows, {"prompts": prompts, "weights_sha256": weights_digest(directory)}


def make_tiny(steps: int) -> tuple[list[Generated], dict[str, Any]]:
    """Goldens of all tiny checkpoints, and what the file says about them."""
    rows: list[Generated] = []
    cases, prompts = [], []
    for index, case in enumerate(tiny_cases()):
        with tempfile.TemporaryDirectory() as folder:
            directory = tiny_checkpoint(Path(folder) / case.name, seed=case.seed, **case.config)
            cases.append({**dataclasses.asdict(case), "weights_sha256": weights_digest(directory)})
            made = _tiny_rows(directory, case, np.random.default_rng(1000 + index), steps)
        rows += made
        prompts += [{"name": f"{case.name}-{len(row.prompt_ids)}", "case": index} for row in made]
        distinct = np.mean([len(set(row.token_ids.tolist())) for row in made])
        least = min(row.gaps.min() for row in made)
        print(f"{case.name}: {len(made)} prompts, least gap {least:.2e}, distinct tokens {distinct:.0f}", flush=True)
    return rows, {"cases": cases, "prompts": prompts}


def _tiny_rows(directory: Path, case: TinyCase, rng: np.random.Generator, steps: int) -> list[Generated]:
    rows = []
    for length in case.prompt_lengths:
        for _ in range(MAX_DRAWS):
            # A new model each time: dynamic rope keeps the frequencies of the longest sequence it has seen.
            model = load_model(directory)
            row = greedy(model, rng.integers(0, model.config.vocab_size, length).tolist(), steps)
            if row.gaps.min() > MIN_GAP:
                break
        else:
            raise ValueError(f"{case.name}: {MAX_DRAWS} prompts of {length} tokens had gaps below {MIN_GAP}")
        rows.append(row)
    return rows


def save(path: Path, rows: Sequence[Generated], about: Mapping[str, Any]) -> None:
    """Write one npz: the rows' arrays stacked, prompts concatenated, `about` and the makers' versions as JSON."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    about = {**about, "versions": versions, "dtype": "float32", "attention": "eager", "ignore_eos": True}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        about=np.array(json.dumps(about, ensure_ascii=False)),
        prompt_ids=np.concatenate([np.array(row.prompt_ids, np.int32) for row in rows]),
        prompt_lengths=np.array([len(row.prompt_ids) for row in rows], np.int32),
        token_ids=np.stack([row.token_ids for row in rows]),
        logprobs=np.stack([row.logprobs for row in rows]),
        gaps=np.stack([row.gaps for row in rows]),
        top_ids=np.stack([row.top_ids for row in rows]),
        top_logprobs=np.stack([row.top_logprobs for row in rows]),
    )
    print(f"{path}: {len(rows)} prompts, {path.stat().st_size} bytes")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("smollm2", "tiny"))
    parser.add_argument("--model", type=Path, help="Hugging Face directory of the demo model (smollm2)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, help="tokens per prompt; default 64 for smollm2, 40 for tiny")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "tiny":
        rows, about = make_tiny(options.steps or 40)
    elif options.model is None:
        parser.error("smollm2 needs --model DIR")
    else:
        rows, about = make_smollm2(options.model, options.steps or 64)
    save(options.out, rows, about)


if __name__ == "__main__":
    main()
