"""The command jaxpaged graphs: a model's programs, compiled for a GPU that need not be there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.graphs.report import CompileReport
    from jaxpaged.graphs.serving import ServingPrograms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options; the model's and the engine's are added by the command line."""
    parser.add_argument("--target", default="h200", help="a100, l4, h100, h200 or b200 (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="compile this many of the model's layers only: quicker")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--only", action="append", metavar="PROGRAM", help="compile this program; may be repeated")
    choice.add_argument("--all", action="store_true", help="compile every program, not just the largest of each kind")
    choice.add_argument("--list", action="store_true", help="list the programs, compile none")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="keep HLO, PTX and JSON of each program there")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the tables there as Markdown")


def run(args: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Compile and print. options: EngineConfig's fields that were given. Raises: ValueError."""
    from jaxpaged import graphs  # takes a second: not for --help
    from jaxpaged.graphs import render, serving

    target = graphs.target(args.target, devices=options.get("tensor_parallel_size", 1))
    model = serving.read_model(args.model, layers=args.layers)
    programs = serving.serving_programs(model, target, **options)
    limits = programs.blueprint.limits
    title = f"{args.model} on {target.devices} × {args.target}"
    print(f"{title}: {limits.num_blocks} KV blocks, up to {limits.max_num_seqs} sequences of {limits.max_model_len}")
    if args.list:
        print("\n".join(programs.recipes))
        return 0
    names = args.only or (list(programs.recipes) if args.all else programs.largest())
    reports = {name: _compile(programs, name, args.dump) for name in names}
    print(f"\n{render.program_table(reports)}\n\n{render.kernel_table(reports, 'attention')}")
    if args.report is not None:
        args.report.write_text(render.markdown(title, reports), "utf-8")
    return 0


def _compile(programs: ServingPrograms, name: str, dump: Path | None) -> CompileReport:
    from jaxpaged.graphs.render import to_json

    folder = None if dump is None else dump / name.replace(" ", "-")
    report = programs.compile(name, dump=folder)
    print(f"{name}: compiled in {report.seconds:.1f} s", flush=True)
    if folder is not None:
        (folder / "report.json").write_text(to_json(report), "utf-8")
    return report
