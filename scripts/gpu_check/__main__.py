"""Runs the sections in order of worth within a budget; a section that crashes the device costs only itself.

python -m scripts.gpu_check [--budget-seconds 480] [--out build/gpu-check] [--sections ceilings,decode] [--dry-run]

The sections run in a child process. When it dies or hangs, what it has measured is kept, the section at fault is noted
and a new child goes on with the next. --dry-run does all of it on CPU with tiny shapes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu_check.record import Record
from scripts.gpu_check.sections import ORDER, run_sections
from scripts.gpu_check.sizes import Sizes

GRACE_SECONDS = 5.0  # a child may take so much longer than the budget to write its last result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("--sections", type=lambda text: text.split(","), default=list(ORDER))
    parser.add_argument("--dry-run", action="store_true", help="on CPU, tiny shapes, kernels in the interpreter")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.sections if name not in ORDER]
    if unknown:
        parser.error(f"sections: wanted some of {list(ORDER)}, got {unknown}")
    if options.child:
        return _child(options)
    return _parent(options)


def _child(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.budget_seconds
    record = Record.load(options.out)
    return run_sections(options.sections, Sizes.create(dry=options.dry_run), record, deadline)


def _parent(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + options.budget_seconds
    record = Record.create(options.out, dry=options.dry_run)
    left = list(options.sections)
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        reason = _run_child(options, left, remaining)
        record = Record.load(options.out)
        if reason is None:
            break
        record.fail_running(reason)
        left = [name for name in left if name not in record.sections]
    for name in options.sections:
        if name not in record.sections:
            record.begin(name)
            record.end(name, "skipped: the budget was spent")
    print(record.markdown())
    return int(record.has_failures)


def _run_child(options: argparse.Namespace, sections: list[str], seconds: float) -> str | None:
    """Run the sections in a new process. Returns why it ended early, or None."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--child", "--out", str(options.out)]
    command += ["--sections", ",".join(sections), "--budget-seconds", str(seconds)]
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if options.dry_run:
        command.append("--dry-run")
        environment["JAX_PLATFORMS"] = "cpu"
    try:
        done = subprocess.run(command, env=environment, timeout=seconds + GRACE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "stopped: still running when the budget was spent"
    return None if done.returncode == 0 else f"the process ended with exit code {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
