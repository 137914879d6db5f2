"""Reading the committed golden outputs (tests/goldens/*.npz) and comparing an engine's output with them.

A file holds N prompts of S greedy steps each, made by scripts/make_goldens.py with Hugging Face transformers
(float32, eager attention, one prompt at a time, not stopped by end-of-sequence tokens): prompt_ids int32 (all prompts
one after the other), prompt_lengths int32[N], token_ids int32[N, S], logprobs float32[N, S] of the chosen tokens,
gaps float32[N, S] between the two best log-probabilities, top_ids int32[N, S, 5] and top_logprobs float32[N, S, 5]
(best first), and about: JSON with the prompts' names and texts, the tiny checkpoints' configs, and versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

GOLDENS = Path(__file__).parent.parent / "goldens"
CLOSE_CALL = 1e-3  # a divergence is forgiven where the reference's two best log-probabilities are closer than this


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One prompt and its S greedy steps. text is None for prompts made of random ids."""

    name: str
    text: str | None
    text_is_cut: bool  # prompt_ids are the first ids of the text only
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray  # float32[S], natural logarithm, of the chosen tokens
    gaps: np.ndarray  # float32[S]
    top_ids: np.ndarray  # int32[S, 5], best first
    top_logprobs: np.ndarray  # float32[S, 5]


@dataclass(frozen=True, kw_only=True)
class TinyGoldens:
    """A tiny checkpoint, to be made with tiny_checkpoint(path, seed=seed, **config), and its goldens."""

    name: str
    seed: int
    config: Mapping[str, Any]
    weights_sha256: str
    goldens: tuple[Golden, ...]


def load_smollm2() -> tuple[Golden, ...]:
    """The demo model's goldens."""
    return _load("smollm2")[0]


def load_tiny() -> tuple[TinyGoldens, ...]:
    """The goldens of all tiny checkpoints."""
    goldens, about = _load("tiny")
    groups: list[list[Golden]] = [[] for _ in about["cases"]]
    for golden, prompt in zip(goldens, about["prompts"], strict=True):
        groups[prompt["case"]].append(golden)
    return tuple(
        TinyGoldens(
            name=case["name"],
            seed=case["seed"],
            config=case["config"],
            weights_sha256=case["weights_sha256"],
            goldens=tuple(group),
        )
        for case, group in zip(about["cases"], groups, strict=True)
    )


def divergence(golden: Golden, token_ids: Sequence[int]) -> int | None:
    """First step at which the ids differ from the golden ones; None if they are equal over the shorter's length."""
    for step, (wanted, got) in enumerate(zip(golden.token_ids, token_ids, strict=False)):
        if wanted != got:
            return step
    return None


def check_greedy(golden: Golden, token_ids: Sequence[int], logprobs: Sequence[float], *, tolerance: float) -> None:
    """Assert that greedy ids equal the golden ones up to a close call, and log-probabilities up to `tolerance`.

    After a forgiven divergence the texts differ, so nothing is compared from there on.
    """
    where = f"{golden.name} ({len(golden.prompt_ids)} prompt tokens)"
    assert len(token_ids) == len(golden.token_ids), f"{where}: got {len(token_ids)} tokens"
    step = divergence(golden, token_ids)
    if step is not None:
        gap = float(golden.gaps[step])
        got = (golden.token_ids[step], token_ids[step])
        assert gap < CLOSE_CALL, f"{where}: step {step} wanted token {got[0]}, got {got[1]}; reference's gap {gap:.4f}"
    errors = np.abs(np.asarray(logprobs, np.float64)[:step] - golden.logprobs[:step])
    assert errors.size == 0 or errors.max() <= tolerance, f"{where}: log-probability off by {errors.max():.2e}"


def weights_digest(directory: Path) -> str:
    """sha256 over the names, types, shapes and bytes of the tensors in a directory's safetensors files.

    Raises ValueError when there is no such file. bfloat16 is not supported.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"wanted safetensors files in {directory}, got none")
    digest = hashlib.sha256()
    for path in files:
        with safe_open(path, "np") as tensors:
            for name in sorted(tensors.keys()):
                array = tensors.get_tensor(name)
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _load(name: str) -> tuple[tuple[Golden, ...], dict[str, Any]]:
    with np.load(GOLDENS / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    about = json.loads(str(arrays["about"]))
    ends = np.cumsum(arrays["prompt_lengths"])
    goldens = []
    for index, prompt in enumerate(about["prompts"]):
        start = int(ends[index - 1]) if index else 0
        goldens.append(
            Golden(
                name=prompt["name"],
                text=prompt.get("text"),
                text_is_cut=prompt.get("cut", False),
                prompt_ids=arrays["prompt_ids"][start : ends[index]].tolist(),
                token_ids=arrays["token_ids"][index].tolist(),
                logprobs=arrays["logprobs"][index],
                gaps=arrays["gaps"][index],
                top_ids=arrays["top_ids"][index],
                top_logprobs=arrays["top_logprobs"][index],
            )
        )
    return tuple(goldens), about
