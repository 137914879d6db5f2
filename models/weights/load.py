"""Streams a checkpoint's tensors into device arrays, one slot of the model at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import jax
import numpy as np

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.weights.source import TensorSource

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SlotPath = tuple[str | int, ...]  # keys into the model's parameter state
_COMPARE_ROWS = 4096  # rows of the head compared at once: bounds the memory of the comparison


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter of the model and the checkpoint tensors it is made of.

    Example: a fused gate and up projection has path ("layers", 3, "mlp", "gate_up"), the two tensors' names,
    their shapes [F, D] each in `expected`, and a build function that stacks them to [2, F, D].
    """

    path: SlotPath  # keys into the model's parameter state
    names: tuple[str, ...]
    expected: tuple[tuple[int, ...], ...]  # per name: the tensor's shape in the checkpoint
    build: Callable[[list[np.ndarray]], np.ndarray]  # arrays in the order of names; may return a view


def load_weights(
    slots: Sequence[Slot],
    source: TensorSource,
    place: Callable[[Slot, np.ndarray], Mapping[SlotPath, jax.Array]],
    ignore: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> dict[SlotPath, jax.Array]:
    """Build every slot and hand it to `place`, which puts it on the device(s), as one array or as several.

    Returns {path: device array}.

    Names and shapes are all checked before anything is read: ValueError listing every missing and misshapen
    tensor. Tensors no slot asks for are listed in one logged warning, except those matching a shell-style
    pattern in `ignore`. One slot's host arrays are alive at a time: each placed array is waited for, so that a
    queue of unfinished transfers cannot hold more. `progress(done, total)` counts slots, and is called with
    done = 0 first.
    """
    check_checkpoint(slots, source)
    warn_of_extra_tensors(slots, source, ignore)
    placed: dict[SlotPath, jax.Array] = {}
    for done, slot in enumerate(slots):
        if progress is not None:
            progress(done, len(slots))
        placed |= _load_slot(slot, source, place)
    if progress is not None:
        progress(len(slots), len(slots))
    return placed


def check_checkpoint(slots: Sequence[Slot], source: TensorSource) -> None:
    """ValueError listing all tensors that the slots need and that are missing or have another shape."""
    present = set(source.names())
    needed = {name: shape for slot in slots for name, shape in zip(slot.names, slot.expected, strict=True)}
    missing = [name for name in needed if name not in present]
    misshapen = [
        f"{name}: wanted {list(shape)}, got {list(source.shape(name))}"
        for name, shape in needed.items()
        if name in present and source.shape(name) != shape
    ]
    if not missing and not misshapen:
        return
    lines = ["the checkpoint does not fit its config"]
    if missing:
        lines.append(f"missing tensors ({len(missing)}): {', '.join(missing)}")
    if HEAD in missing:
        lines.append(f"a model without {HEAD} must say tie_word_embeddings: true in its config")
    if misshapen:
        lines.append(f"tensors of another shape ({len(misshapen)}): {'; '.join(misshapen)}")
    raise ValueError("\n".join(lines))


def warn_of_extra_tensors(slots: Sequence[Slot], source: TensorSource, ignore: Sequence[str]) -> None:
    """Log one warning that lists the tensors no slot uses and no pattern in `ignore` covers."""
    used = {name for slot in slots for name in slot.names}
    extra = [
        name
        for name in source.names()
        if name not in used and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if extra:
        logger.warning("the model does not use %d tensors of the checkpoint: %s", len(extra), ", ".join(extra))


def ignorable_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of tensors that may be left over without a warning: old files' rope buffers, a tied model's head."""
    patterns = ("*.rotary_emb.inv_freq",)
    return (*patterns, HEAD) if config.tie_word_embeddings else patterns


def settle_head(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """The config with tie_word_embeddings as the checkpoint bears it out, following transformers.

    A tied model whose file also holds a head: equal to the embedding, it stays tied; different, the head in the
    file is used, with a logged warning. A head of another shape cannot be used: it stays tied, with a warning.
    """
    names = set(source.names())
    if not config.tie_word_embeddings or HEAD not in names or EMBEDDING not in names:
        return config
    if source.shape(HEAD) != source.shape(EMBEDDING):
        logger.warning(
            "the config ties %s to %s; the checkpoint's own %s has another shape, %s, and is ignored",
            HEAD,
            EMBEDDING,
            HEAD,
            list(source.shape(HEAD)),
        )
        return config
    if _equal(source.read(HEAD), source.read(EMBEDDING)):
        return config
    logger.warning(
        "the config ties %s to %s, but the checkpoint holds both with different values, so they are not tied; "
        "set tie_word_embeddings to false in the config to silence this warning",
        HEAD,
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    starts = range(0, left.shape[0], _COMPARE_ROWS)
    return all(np.array_equal(left[at : at + _COMPARE_ROWS], right[at : at + _COMPARE_ROWS]) for at in starts)


def _load_slot(
    slot: Slot, source: TensorSource, place: Callable[[Slot, np.ndarray], Mapping[SlotPath, jax.Array]]
) -> Mapping[SlotPath, jax.Array]:
    """One slot's arrays live only in this frame."""
    return jax.block_until_ready(place(slot, slot.build([source.read(name) for name in slot.names])))
