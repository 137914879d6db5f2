"""Test set-up: eight CPU devices, strict JAX, runtime shape checks. Runs before jax is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set its environment; find the plugin that did")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Tiny models spend their time in the compiler: no optimisation, and programs shared by workers and later runs.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "test-programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import hypothesis  # noqa: E402
import jaxtyping  # noqa: E402

import tests.support.typecheck  # noqa: E402, F401  the hook below finds it by name

# Every function of the package is type- and shape-checked at run time while tests run.
jaxtyping.install_import_hook("jaxpaged", "tests.support.typecheck.check_types")

# The same examples in every run and worker, and no deadline: the first call of a case may compile.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")
