"""How large everything is: for a data centre's GPU, and for a dry run on CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of all sections, in order of worth where a list is cut by the budget."""

    dry: bool
    repeats: int  # steps in a timed program
    rounds: int
    patience: float  # factor on the seconds that a case is expected to take
    copy_bytes: int
    matmul_size: int
    heads: tuple[int, int, int]  # K, G, H
    dtype: str
    decode: tuple[tuple[int, int], ...]  # (rows, context)
    decode_blocks: tuple[int, ...]  # block sizes
    lists: tuple[int, int]  # (rows, context)
    sweep: tuple[tuple[int, int], ...]
    sweep_kv: tuple[int, ...]
    sweep_stages: tuple[int, ...]
    sweep_occupancy: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]  # (new tokens, context before them)
    weights: tuple[tuple[int, int], ...]  # (inputs, outputs)
    group: int
    tokens: tuple[int, ...]  # of products
    batches: tuple[int, ...]  # requests at once, engine
    prompt: int  # tokens
    output: int
    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    steps: int  # tokens that a peer generates

    @classmethod
    def create(cls, *, dry: bool) -> Sizes:
        """The sizes of the real check, or of the dry run."""
        return _DRY if dry else _FULL


_FULL = Sizes(
    dry=False,
    repeats=16,
    rounds=5,
    patience=1.0,
    copy_bytes=2 << 30,
    matmul_size=8192,
    heads=(8, 4, 128),
    dtype="bfloat16",
    decode=(
        (64, 8192), (8, 8192), (1, 32768), (256, 1024), (8, 32768), (1, 131072), (64, 1024), (64, 32768), (256, 8192),
        (1, 8192), (8, 131072), (8, 1024), (1, 1024), (256, 32768), (64, 131072), (256, 131072),
    ),
    decode_blocks=(16, 64),
    lists=(64, 1024),
    sweep=((64, 8192), (1, 32768)),
    sweep_kv=(64, 32, 128),
    sweep_stages=(5, 4, 3, 2),
    sweep_occupancy=(2, 1, 4),
    prefill=((8192, 0), (2048, 0), (2048, 30720), (512, 7680)),
    weights=((4096, 28672), (14336, 4096), (4096, 6144)),
    group=128,
    tokens=(16, 1, 64, 256, 2048),
    batches=(256, 1, 64, 8),
    prompt=128,
    output=128,
    layers=32,
    hidden=4096,
    mlp=14336,
    vocabulary=128256,
    steps=64,
)  # fmt: skip

_DRY = Sizes(
    dry=True,
    repeats=1,
    rounds=1,
    patience=0.0,
    copy_bytes=1 << 12,
    matmul_size=16,
    heads=(2, 2, 16),
    dtype="float32",
    decode=((2, 32),),
    decode_blocks=(16,),
    lists=(2, 32),
    sweep=((2, 32),),
    sweep_kv=(16,),
    sweep_stages=(2,),
    sweep_occupancy=(1,),
    prefill=((16, 16),),
    weights=((128, 128),),
    group=128,
    tokens=(1,),
    batches=(2,),
    prompt=4,
    output=3,
    layers=1,
    hidden=32,
    mlp=64,
    vocabulary=64,
    steps=2,
)
