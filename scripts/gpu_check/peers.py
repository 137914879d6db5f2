"""torch on the same GPU, in processes of its own: dense attention, and transformers' generate on the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from scripts.gpu_check.context import Context
from scripts.gpu_check.model import llama_config

MODULE = "scripts.gpu_check.torch_peer"


def run(context: Context) -> None:
    sizes = context.sizes
    cases: list[dict[str, Any]] = [
        {"peer": "transformers generate", "requests": count, "prompt": sizes.prompt, "output": sizes.steps}
        for count in (1, *(count for count in sizes.batches if count > 1))
    ]
    cases += [{"peer": "torch SDPA", "rows": rows, "context": length} for rows, length in sizes.decode[:6]]
    for facts in cases:
        job = {**facts, "config": llama_config(sizes), "heads": sizes.heads, "rounds": sizes.rounds}
        context.case(facts, lambda job=job: _run(job, context.seconds_left), seconds=25.0)


def _run(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the child prints. Raises: NotImplementedError without torch."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise NotImplementedError(f"{' and '.join(missing)} not installed")
    command = [sys.executable, "-m", MODULE, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds), check=False)
    if done.returncode:
        raise RuntimeError(f"{MODULE} ended with {done.returncode}: {done.stderr[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])
