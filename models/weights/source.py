"""Where a model's tensors come from, whatever the file format."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors of one checkpoint. Names are Hugging Face's, e.g. model.layers.0.self_attn.q_proj.weight."""

    def names(self) -> tuple[str, ...]:
        """Every tensor of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch's layout ([out, in] for a projection). ValueError for an unknown name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in torch's layout, read-only, numpy's or ml_dtypes' type. ValueError for an unknown name."""
        ...

    def close(self) -> None:
        """Give the files back; read() is refused afterwards. Arrays read before stay valid."""
        ...
