"""Weights of a running engine: shared without copies, replaced, put to sleep and woken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpaged import LLM, SamplingParams
from tests.support.driving import answer
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint

IDS = [5, 9, 12, 700, 31, 8, 77, 200, 41]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("weights")
    return tiny_checkpoint(folder / "one", seed=1), tiny_checkpoint(folder / "two", seed=2)


def engine(path: Path, **options: Any) -> LLM:
    return small_llm(path, skip_tokenizer_init=True, max_num_batched_tokens=8, **options)


def tokens(llm: LLM) -> list[int]:
    return list(answer(llm, IDS, max_tokens=8).token_ids)


def pointers(state: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


def test_other_weights_answer_as_an_engine_built_with_them(paths: tuple[Path, Path]) -> None:
    """Also right after a full prefix cache: blocks computed by the old weights were hit."""
    one, two = engine(paths[0]), engine(paths[1])
    mine, wanted = tokens(one), tokens(two)
    assert mine != wanted
    one.update_weights(two.model_state()[1])
    assert tokens(one) == wanted
    assert one.stats()["prefix_hits"] == 0


def test_matching_arrays_are_shared_not_copied(paths: tuple[Path, Path]) -> None:
    one, two = engine(paths[0]), engine(paths[1])
    graphdef, state = two.model_state()
    one.update_weights(state)
    assert pointers(one.model_state()[1]) == pointers(state)
    one.update_weights(nnx.merge(graphdef, state))  # a module
    assert pointers(one.model_state()[1]) == pointers(state)


def test_any_pytree_with_the_names_will_do(paths: tuple[Path, Path]) -> None:
    one, two = engine(paths[0]), engine(paths[1])
    wanted = tokens(two)
    nested = nnx.to_pure_dict(two.model_state()[1])
    flat = {".".join(map(str, path)): np.array(leaf[...]) for path, leaf in nnx.to_flat_state(two.model_state()[1])}
    for weights in (nested, flat):
        one.update_weights(engine_state(paths[0]))
        one.update_weights(weights)
        assert tokens(one) == wanted
    flat["embed_vd"][:] = 0  # numpy arrays may change later: the engine has its own copy
    assert tokens(one) == wanted


def engine_state(path: Path) -> Any:
    return engine(path).model_state()[1]


def test_two_devices_get_their_parts(paths: tuple[Path, Path]) -> None:
    one, two = engine(paths[0], tensor_parallel_size=2), engine(paths[1])
    wanted = tokens(two)
    one.update_weights(two.model_state()[1])
    assert tokens(one) == wanted
    assert pointers_of_shards(one) == pointers_of_shards(one)
    state = one.model_state()[1]
    one.update_weights(state)
    assert tokens(one) == wanted


def pointers_of_shards(llm: LLM) -> list[int]:
    leaves = jax.tree.leaves(llm.model_state()[1])
    return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]


def test_everything_that_does_not_fit_is_named_and_nothing_changed(paths: tuple[Path, Path]) -> None:
    llm = engine(paths[0])
    before = tokens(llm)
    weights = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(llm.model_state()[1])}
    broken = {
        **weights,
        "embed_vd": jnp.zeros((3, 64)),
        "layers.0.mlp.down_df": weights["layers.0.mlp.down_df"].astype(jnp.bfloat16),
        "layers.9.mlp.down_df": weights["layers.0.mlp.down_df"],
    }
    del broken["final_norm.scale_d"]
    with pytest.raises(ValueError, match="update_weights") as told:
        llm.update_weights(broken)
    for part in (
        "1 missing: final_norm.scale_d",
        "1 unknown: layers.9.mlp.down_df",
        "embed_vd (wanted (1024, 64), got (3, 64))",
        "layers.0.mlp.down_df (wanted float32, got bfloat16)",
    ):
        assert part in str(told.value)
    with pytest.raises(ValueError, match="wanted an array under 'embed_vd', got float"):
        llm.update_weights({**weights, "embed_vd": 1.0})
    weights["embed_vd"] = jnp.array(weights["embed_vd"])
    weights["embed_vd"].delete()
    with pytest.raises(ValueError, match=r"deleted \(donated to a computation\?\): embed_vd"):
        llm.update_weights(weights)
    assert tokens(llm) == before


def test_running_requests_are_not_torn(paths: tuple[Path, Path]) -> None:
    """Half an answer by each of two models would be nobody's: the caller waits or aborts."""
    llm = engine(paths[0])
    whole = tokens(llm)
    stream = llm.generate_stream(IDS, SamplingParams(temperature=0, max_tokens=8))
    first = next(stream).outputs[0].token_ids
    for change in (lambda: llm.update_weights(llm.model_state()[1]), llm.sleep):
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            change()
    rest = [token for output in stream for token in output.outputs[0].token_ids]
    assert [*first, *rest] == whole
    llm.update_weights(llm.model_state()[1])


@pytest.mark.parametrize("tags", [None, ["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_sleep_and_wake(paths: tuple[Path, Path], tags: list[str] | None) -> None:
    llm = engine(paths[0])
    before = tokens(llm)
    assert not llm.is_sleeping
    llm.sleep()
    assert llm.is_sleeping
    assert llm.engine.weights.asleep == {"weights", "kv_cache"}
    for call in (
        lambda: llm.generate(IDS, use_tqdm=False),
        lambda: llm.score_continuations(IDS, [[1]], use_tqdm=False),
        lambda: llm.embed(IDS, use_tqdm=False),
        lambda: next(llm.generate_stream(IDS)),
        llm.model_state,
    ):
        with pytest.raises(RuntimeError, match=r"asleep \(kv_cache, weights\): call wake_up\(\) first"):
            call()
    assert llm.engine.num_unfinished == 0
    llm.sleep()  # twice is as once
    for tag in [None] if tags is None else tags:
        llm.wake_up(None if tag is None else [tag])
    assert not llm.is_sleeping
    assert tokens(llm) == before
    assert llm.stats()["prefix_hits"] == 0, "what the dropped cache held was hit"


def test_sleep_frees_the_memory(paths: tuple[Path, Path]) -> None:
    llm = engine(paths[0], num_gpu_blocks_override=301)
    tokens(llm)

    def cache_arrays() -> int:
        return sum(array.shape[0] == 301 for array in jax.live_arrays() if array.ndim == 4)

    assert cache_arrays() == 4
    llm.sleep(level=2)
    assert cache_arrays() == 0
    assert llm.engine.weights._on_host is None


def test_dropped_weights_come_back_by_an_update(paths: tuple[Path, Path]) -> None:
    llm, other = engine(paths[0]), engine(paths[1])
    wanted = tokens(other)
    llm.sleep(level=2)
    with pytest.raises(RuntimeError, match="dropped the weights: give new ones with update_weights"):
        llm.wake_up()
    llm.update_weights(other.model_state()[1])
    assert llm.engine.weights.asleep == {"kv_cache"}
    llm.wake_up(["kv_cache"])
    assert tokens(llm) == wanted


def test_bad_calls_are_refused(paths: tuple[Path, Path]) -> None:
    llm = engine(paths[0])
    with pytest.raises(ValueError, match="level: wanted 1"):
        llm.sleep(level=0)
    for tags in (["scheduling"], "weights"):
        with pytest.raises(ValueError, match="tags: wanted some of"):
            llm.wake_up(tags)
