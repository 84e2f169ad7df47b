"""What the side-by-side benchmarks share: models, timing in turn, checks, the header and the table.

Every figure is a ratio of two things measured in turn in one process, because times of different runs on a shared
machine cannot be compared. Outputs are checked to be equal before anything is timed. Slower cases stay in.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers


@dataclass
class Row:
    """One comparison: `ratio` is ours / baseline, so below 1 is faster and "at most 1.10" reads as written."""

    name: str
    baseline: str
    ratio: float
    low: float
    high: float
    baseline_ms: float
    ours_ms: float
    rounds: int
    target: str = ""
    notes: str = ""


def header(title: str, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What must be known of a run to make it again; printed, and the head of its file."""
    found = {
        "benchmark": title,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "seed": args.seed,
        **({"clock": args.clock} if "clock" in args else {}),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **more,
    }
    for key, value in found.items():
        print(f"{key:<13} {value}")
    return found


@dataclass
class Report:
    """The header, the rows, and where they go."""

    title: str
    args: argparse.Namespace
    shapes: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.header = header(self.title, self.args, shapes=self.shapes)
        print()
        print(
            f"{'case':<44} {'against':<34} {'ours/base':>9}  {'quartiles':<14} {'base ms':>9} {'ours ms':>9}  target"
        )

    def add(
        self,
        name: str,
        baseline: str,
        times: Sequence[tuple[float, float]],
        target: str = "",
        notes: str = "",
    ) -> Row:
        """Take `(baseline, ours)` times in ms of all rounds; print and keep the row."""
        ratios = [ours / base for base, ours in times]
        low, middle, high = quartiles(ratios)
        base_ms, ours_ms = (statistics.median(column) for column in zip(*times, strict=True))
        row = Row(name, baseline, middle, low, high, base_ms, ours_ms, len(times), target, notes)
        self.rows.append(row)
        spread = f"[{low:.3f}, {high:.3f}]"
        print(
            f"{name:<44} {baseline:<34} {middle:>9.3f}  {spread:<14} {base_ms:>9.1f} {ours_ms:>9.1f}  {target}",
            flush=True,
        )
        if notes:
            print(f"    {notes}")
        return row

    def finish(self) -> None:
        if self.args.json:
            data = {**self.header, "rows": [asdict(row) for row in self.rows]}
            Path(self.args.json).write_text(json.dumps(data, indent=2) + "\n")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def parser(description: str, *, rounds: int, clock: bool = False) -> argparse.ArgumentParser:
    """The options of all scripts; with `clock`, which time is taken is one of them."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--rounds", type=int, default=rounds, help="measurements of each case, in turn with the baseline"
    )
    made.add_argument("--threads", type=int, default=1, help="torch threads; two spin on a shared machine")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", metavar="FILE", help="also write header and rows to this file")
    made.add_argument(
        "--tiny", action="store_true", help="tiny random models and short prompts: tries the script only"
    )
    if clock:
        made.add_argument(
            "--clock",
            choices=_CLOCKS,
            default="wall",
            help="cpu: time of the process on the CPU, for a machine that has other work; the same on an idle one",
        )
    return made


def start(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = made.parse_args(argv)
    if args.rounds < 1:
        made.error("--rounds must be at least 1")
    global _clock
    _clock = _CLOCKS[getattr(args, "clock", "wall")]
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    transformers.logging.set_verbosity_error()
    return args


def commit() -> str:
    """The short commit, with a `+` if the tree has changes; `unknown` outside of a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "--", "../radixkv") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------------- models


def gemma(args: argparse.Namespace) -> Any:
    """Gemma 3 270M in fp32, or a tiny random model of the same kind."""
    if not args.tiny:
        from radixkv.demo.weights import load_gemma

        return load_gemma()[0].float().eval()
    config = transformers.Gemma3TextConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=4096,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    return transformers.Gemma3ForCausalLM(config).float().eval()


def llama(args: argparse.Namespace) -> Any:
    """Random Llama of 4 layers, 8 KV heads of 64; a vocabulary of 4,096, so that attention is what is measured."""
    width, layers, heads = (32, 2, 2) if args.tiny else (512, 4, 8)
    config = transformers.LlamaConfig(
        vocab_size=512 if args.tiny else 4096,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        max_position_embeddings=16384,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config).float().eval()


def plain_twin(model: Any) -> Any:
    """The same model once more on the same weights: what plain transformers does, with no hook of ours on it."""
    with torch.device("meta"):
        other = type(model)(model.config)
    other.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():  # rotary frequencies are not in the state dict
        owner, _, leaf = name.rpartition(".")
        other.get_submodule(owner).register_buffer(leaf, buffer.clone(), persistent=False)
        original = f"original_{leaf}"
        if hasattr(model.get_submodule(owner), original):
            setattr(other.get_submodule(owner), original, getattr(model.get_submodule(owner), original))
    other.tie_weights()
    other.generation_config = model.generation_config
    return other.eval()


def make_cache(model: Any, num_tokens: int) -> Any:
    import radixkv

    return radixkv.PrefixCache.for_model(model, num_tokens=num_tokens)


def ids(model: Any, length: int, seed: int) -> torch.Tensor:
    """`[1, length]` token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, model.config.vocab_size - 16, (1, length), generator=generator)


def cache_keyword(model: Any) -> str:
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    return output["cache"] if "cache" in output else output["past_key_values"]


# ---------------------------------------------------------------------------------------------------- timing


_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_clock = _CLOCKS["wall"]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time in ms, by the clock that `start` was asked for, and the result."""
    begin = _clock()
    result = call()
    return (_clock() - begin) * 1e3, result


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: each goes first in turn, so that drift hits all alike."""
    shift = index % len(names)
    return [*names[shift:], *names[:shift]]


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection while something is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turn(
    rounds: int,
    prepare: Callable[[int], dict[str, Callable[[], Any]]],
    check: Callable[[dict[str, Any]], None],
) -> dict[str, list[float]]:
    """Run all candidates once a round, in an order that rotates; return their times in ms.

    Args:
        rounds: Measured rounds. One more, round 0, warms everything up and is not kept.
        prepare: Gives the candidates of a round by name; what it does itself is not timed.
        check: Is given all results of a round by name and raises if they differ.
    """
    times: dict[str, list[float]] = {}
    for index in range(rounds + 1):
        candidates = prepare(index)
        results = {}
        with undisturbed():
            for name in rotated(list(candidates), index):
                spent, results[name] = timed(candidates[name])
                if index:
                    times.setdefault(name, []).append(spent)
        check(results)
    return times


def pairs(times: dict[str, list[float]], baseline: str, ours: str) -> list[tuple[float, float]]:
    return list(zip(times[baseline], times[ours], strict=True))


def same_tokens(results: dict[str, torch.Tensor]) -> None:
    first_name, first = next(iter(results.items()))
    for name, result in results.items():
        if result.tolist() != first.tolist():
            raise SystemExit(
                f"outputs differ: {first_name} gives {first.tolist()}, {name} gives {result.tolist()}"
            )
