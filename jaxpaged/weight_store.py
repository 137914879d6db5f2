"""The weights of a running engine from outside: handing them out, replacing them, taking them off the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpaged.blueprint import Blueprint
from jaxpaged.runner import ModelRunner

WEIGHTS, CACHE = "weights", "kv_cache"  # what sleeps, by the tags of wake_up()
_NAMED = 8  # names listed of each kind of mismatch


class WeightStore:
    """Moves an idle engine's weights and cache. The runner owns both; this knows their names, shapes and layouts."""

    def __init__(self, blueprint: Blueprint, runner: ModelRunner, settle: Callable[[str], None]) -> None:
        """settle(what) makes sure that nothing runs and that the prefix cache is empty, or raises RuntimeError."""
        self._code = blueprint.code
        self._parameters = {".".join(map(str, p.path)): p for p in blueprint.parameters}
        self._runner, self._settle = runner, settle
        self._on_host: tuple[np.ndarray, ...] | None = None  # the weights of an engine that sleeps at level 1
        self._asleep: frozenset[str] = frozenset()

    @property
    def asleep(self) -> frozenset[str]:
        """What is not on the devices: "weights", "kv_cache", both or nothing."""
        return self._asleep

    def check_awake(self) -> None:
        """Raises RuntimeError while the engine sleeps."""
        if self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}): call wake_up() first")

    def split(self) -> tuple[Any, Any]:
        """(graphdef, state) as nnx.split gives them; the state holds the engine's own arrays, not copies."""
        if WEIGHTS in self._asleep:
            self.check_awake()
        return self._code.graphdef, jax.tree.unflatten(self._code.params_tree, self._runner.params)

    def update(self, weights: Any) -> None:
        """Take other weights: an nnx module or state, or a pytree of arrays with the names of split()'s state.

        Arrays already laid out as the engine wants them are taken as they are, without a copy. Nothing is changed
        where a ValueError is raised: names, shapes and dtypes are all checked first. Wakes the weights of an engine
        that sleeps. Raises RuntimeError while requests run.
        """
        found = _by_name(weights)
        self._check(found)
        self._settle("update_weights")
        placed = [_place(found[name], parameter.sharding) for name, parameter in self._parameters.items()]
        self._runner.replace_params(tuple(placed))
        self._on_host = None
        self._asleep -= {WEIGHTS}

    def sleep(self, level: int) -> None:
        """Free the devices' memory: drop the cache, and move the weights to the host (level 1) or drop them (2)."""
        if level not in (1, 2):
            raise ValueError(f"level: wanted 1 (weights to the host) or 2 (weights dropped), got {level!r}")
        self._settle("sleep")
        if WEIGHTS not in self._asleep:
            params = self._runner.params
            self._on_host = tuple(np.asarray(array) for array in params) if level == 1 else None
            self._runner.replace_params(())
        elif level == 2:
            self._on_host = None
        self._runner.drop_cache()
        self._asleep = frozenset({WEIGHTS, CACHE})

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Bring back what sleeps of the tags ("weights", "kv_cache"; None: both). Raises ValueError for other tags,
        RuntimeError for weights that were dropped.
        """
        wanted = {WEIGHTS, CACHE} if tags is None else set(tags)
        if isinstance(tags, str) or wanted - {WEIGHTS, CACHE}:
            raise ValueError(f"tags: wanted some of {[WEIGHTS, CACHE]} or None, got {tags!r}")
        for tag in sorted(wanted & self._asleep, reverse=True):  # the weights first
            if tag == WEIGHTS:
                self._restore()
            else:
                self._runner.make_cache()
            self._asleep -= {tag}

    def _restore(self) -> None:
        if self._on_host is None:
            raise RuntimeError("sleep(level=2) dropped the weights: give new ones with update_weights()")
        layouts = [parameter.sharding for parameter in self._parameters.values()]
        placed = [jax.device_put(host, layout) for host, layout in zip(self._on_host, layouts, strict=True)]
        self._runner.replace_params(tuple(placed))
        self._on_host = None

    def _check(self, found: Mapping[str, Any]) -> None:
        """One ValueError naming all that is missing, too much, or of another shape or dtype."""
        wanted = self._parameters
        faults = {
            "missing": [name for name in wanted if name not in found],
            "unknown": [name for name in found if name not in wanted],
        }
        both = [name for name in wanted if name in found]
        faults["of another shape"] = [
            f"{name} (wanted {wanted[name].shape}, got {tuple(found[name].shape)})"
            for name in both
            if tuple(found[name].shape) != tuple(wanted[name].shape)
        ]
        faults["of another dtype"] = [
            f"{name} (wanted {np.dtype(wanted[name].dtype)}, got {found[name].dtype})"
            for name in both
            if found[name].dtype != wanted[name].dtype
        ]
        faults["deleted (donated to a computation?)"] = [
            name for name in both if isinstance(found[name], jax.Array) and found[name].is_deleted()
        ]
        told = [f"{len(names)} {what}: {_listed(names)}" for what, names in faults.items() if names]
        if told:
            raise ValueError(
                f"update_weights: wanted the {len(wanted)} arrays of LLM.model_state(), in their dtypes; "
                + "; ".join(told)
            )


def _by_name(weights: Any) -> dict[str, Any]:
    """Arrays by dotted name, out of an nnx module, an nnx state or any other pytree.

    Example: {"layers": [{"mlp": {"down_df": x}}]} and {"layers.0.mlp.down_df": x} both name layers.0.mlp.down_df.
    """
    tree = nnx.state(weights, nnx.Param) if isinstance(weights, nnx.Module) else weights
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = ".".join(_key(key) for key in path)
        name = name.removesuffix(".value")  # an nnx variable's array
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"update_weights: wanted an array under {name or 'the root'!r}, got {type(leaf).__name__}")
        found[name] = leaf
    return found


def _key(key: Any) -> str:
    kinds = jax.tree_util
    if isinstance(key, kinds.SequenceKey):
        return str(key.idx)
    if isinstance(key, kinds.GetAttrKey):
        return key.name
    return str(key.key) if isinstance(key, kinds.DictKey | kinds.FlattenedIndexKey) else str(key)


def _place(array: jax.Array | np.ndarray, layout: Any) -> jax.Array:
    """The array in the engine's layout: itself if it has it; a copy of a numpy array, which could change later."""
    return jax.device_put(array if isinstance(array, jax.Array) else np.array(array), layout)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
