"""The device mesh of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

MODEL_AXIS = "model"  # tensor parallelism


def make_mesh(
    tensor_parallel_size: int,
    devices: Sequence[Any],  # of jax.Device, which is not a static type
) -> Mesh:
    """A mesh of the first tensor_parallel_size devices along one axis.

    Raises: ValueError when there are fewer devices.
    """
    if len(devices) < tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size: wanted {tensor_parallel_size} devices, got {len(devices)} ({devices[0].platform})"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (MODEL_AXIS,))
