"""One run on a GPU: is everything right, and how fast is it? About six minutes on an H200.

    python benchmarks/gpu.py --output benchmarks/results/gpu.json          # or OUT=folder, or neither
    python benchmarks/gpu.py --double --small                              # tries the script on a CPU

Phases, each with a share of the time: what is left of one goes to those after it. A phase that fails says why, and the
others go on, in a new process if CUDA is of no use any more. Shortly before the limit the results so far are written,
whatever hangs. Exit code 0: all was done and is right; 1: something is wrong or failed; 2: wrong usage; 3: nothing is
wrong, but there was no time for some of it; 4: cut off at the limit.

It needs a checkout: the judge of the attention kernels is that of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The tests' double, and their judge.
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "attention"))

import torch
import transformers
from gpu_parts import building, correctness, environment, kernels, plugin, serving, swapping, table
from gpu_parts.session import Phase, Session, run_phases, start_watchdog

SCRIPT = Path(__file__).resolve()

PHASES = [
    Phase("environment", environment.environment, 5),
    Phase("kernels", building.kernels, 10),
    Phase("correctness", correctness.correctness, 45),
    Phase("bandwidth", kernels.bandwidth, 5),
    Phase("decode", kernels.decode, 45),
    Phase("prefill", kernels.prefill, 15),
    Phase("cascade", kernels.cascade, 15),
    Phase("swap", swapping.swap, 10),
    Phase("engine", serving.engine_llama, 120),
    Phase("plugin", plugin.plugin, 25),
    Phase("gemma", serving.engine_gemma, 45),
]
# Seconds more, with --compile, for the phase that builds kernels.
COMPILING = 120


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    names = [phase.name for phase in PHASES]
    made.add_argument("phases", nargs="*", metavar="PHASE", help=f"only these: {' '.join(names)}")
    made.add_argument(
        "--output", type=Path, help="JSON file; default: gpu.json in the folder $OUT, if that is set"
    )
    made.add_argument(
        "--limit",
        type=float,
        default=argparse.SUPPRESS,
        help=f"seconds for everything (default: 345, and {COMPILING} more with --compile)",
    )
    made.add_argument("--small", action="store_true", help="small sizes: tries the script only")
    made.add_argument(
        "--compile", action="store_true", help="also kinds whose kernels are rarely there: float16, soft cap"
    )
    made.add_argument("--double", action="store_true", help="the tests' stand-in for FlashInfer, on the CPU")
    made.add_argument("--resume", type=Path, help=argparse.SUPPRESS)
    return made


def make_session(made: argparse.ArgumentParser, args: argparse.Namespace) -> Session:
    unknown = set(args.phases) - {phase.name for phase in PHASES}
    if unknown:
        made.error(
            f"no phase is called {', '.join(sorted(unknown))}: take of {' '.join(p.name for p in PHASES)}"
        )
    limit = getattr(args, "limit", 345.0 + COMPILING * args.compile)
    if limit < 10:
        made.error("--limit must be at least 10 seconds")
    double: Any = None
    if args.double and not args.small:
        made.error("--double computes in float64 on the CPU, hours of it: add --small")
    if args.double:
        from fake_flashinfer import Double

        double = Double.relaxed(graphs=True)
    elif not torch.cuda.is_available():
        made.error("torch finds no GPU: to try the script without one, add --double --small")
    output = args.output
    if output is None and os.environ.get("OUT"):
        output = Path(os.environ["OUT"]) / "gpu.json"
    session = Session(
        device=torch.device("cpu" if args.double else "cuda:0"),
        dtype=torch.float32 if args.double else torch.bfloat16,
        small=args.small,
        compile=args.compile,
        double=double,
        output=output,
        limit=limit,
    )
    if args.resume:
        before = json.loads(args.resume.read_text())
        for key in ("started", "rows", "phases", "wrong", "header"):
            setattr(session, key, before[key])
        session.shared |= before["shared"]
    return session


def hand_over(session: Session, left: list[str], argv: Sequence[str]) -> None:
    """Go on with the remaining phases in a new process: this one has lost the device."""
    state = Path(os.environ.get("TMPDIR", "/tmp")) / f"radixkv-gpu-{os.getpid()}.json"
    numbers = {key: value for key, value in session.shared.items() if isinstance(value, float)}
    state.write_text(
        json.dumps(
            {
                "started": session.started,
                "rows": session.rows,
                "phases": session.phases,
                "wrong": session.wrong,
                "header": session.header,
                "shared": numbers,
            },
            default=str,
        )
    )
    options = [word for word in argv if word not in {phase.name for phase in PHASES}]
    if "--resume" in options:
        at = options.index("--resume")
        del options[at : at + 2]
    print(f"going on with {' '.join(left)} in a new process", flush=True)
    os.execv(sys.executable, [sys.executable, str(SCRIPT), *left, *options, "--resume", str(state)])


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    made = parser()
    args = made.parse_args(words)
    session = make_session(made, args)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()

    def finish(ended: str) -> None:
        wanted = [
            {"what": what, "target": aim, "found": found, "reached": ok}
            for what, aim, found, ok in table.targets(session)
        ]
        session.save(ended=ended, targets=wanted)
        print("\n".join(table.lines(session)))
        print(f"\n{ended}; {len(session.rows)} results in {session.output or 'no file'}", flush=True)

    def stop(number: int, _: Any) -> None:
        raise SystemExit(f"ended by signal {number}")

    terminate = signal.signal(signal.SIGTERM, stop)
    over = start_watchdog(session, finish)
    session.header.setdefault("command", " ".join(["gpu.py", *words]))
    session.header.setdefault("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    chosen = [phase for phase in PHASES if not args.phases or phase.name in args.phases]
    if args.compile:
        more = {"kernels": COMPILING}
        chosen = [replace(phase, seconds=phase.seconds + more.get(phase.name, 0)) for phase in chosen]
    ended = "interrupted"
    try:
        with torch.no_grad():
            left = run_phases(session, chosen)
        if left:
            hand_over(session, left, words)
        ended = "complete"
        if session.left_out:
            ended = f"incomplete: no time for {len(session.left_out)} parts"
    finally:
        over.set()
        finish(ended)
        signal.signal(signal.SIGTERM, terminate)
        transformers.logging.set_verbosity(verbosity)
    failed = any(phase["status"] not in ("done", "skipped") for phase in session.phases.values())
    return 1 if failed or session.wrong else 3 if session.left_out else 0


if __name__ == "__main__":
    raise SystemExit(main())
