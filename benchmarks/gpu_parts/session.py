"""What all phases share: where to compute, how long they may, and where results go."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Seconds before the limit at which the watchdog writes what there is and ends the process.
WATCHDOG_MARGIN = 6.0
OUT_OF_TIME = "out of time"


class Skip(Exception):
    """A phase, or a part of one, that cannot be run here; the message says why."""


@dataclass(frozen=True)
class Phase:
    """A part of the run.

    Attributes:
        name: As on the command line.
        run: Called with the session.
        seconds: Its share of the time; what it leaves goes to those after it.
    """

    name: str
    run: Callable[[Session], None]
    seconds: float


@dataclass
class Session:
    """One run of the script.

    Attributes:
        device: Where everything is computed.
        dtype: Of keys, values and models.
        small: Sizes that only try the script.
        compile: Also what needs kernels that are compiled first.
        double: The stand-in for FlashInfer; None for the package itself.
        output: The JSON file; None writes none.
        started: `time.time()` of the first process of the run.
        limit: Seconds that the run may take in all.
        rows: Results: phase, name and figures.
        phases: What became of each phase.
        wrong: Checks that failed.
        header: Where and when.
        shared: What later phases use of earlier ones, such as models and bandwidths.
    """

    device: torch.device
    dtype: torch.dtype
    small: bool = False
    compile: bool = False
    double: Any = None
    output: Path | None = None
    started: float = field(default_factory=time.time)
    limit: float = 345.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    phase: str = ""
    deadline: float = 0.0
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    # -- time -------------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return time.time() - self.started

    @property
    def left(self) -> float:
        """Seconds until this phase should end."""
        return self.deadline - self.elapsed

    def out_of_time(self, name: str, need: float = 0.0) -> bool:
        """Whether there is no time left for something that takes `need` seconds; notes that if so."""
        if self.left >= need:
            return False
        self.note(name, skipped=OUT_OF_TIME)
        return True

    @property
    def left_out(self) -> list[str]:
        """What there was no time for."""
        return [f"{row['phase']}: {row['name']}" for row in self.rows if row.get("skipped") == OUT_OF_TIME]

    # -- results ----------------------------------------------------------------------------------------------

    def note(self, name: str, **figures: Any) -> dict[str, Any]:
        """Keep a result, and print it."""
        row = {"phase": self.phase, "name": name, **figures}
        with self.lock:
            self.rows.append(row)
        shown = "  ".join(f"{key}={brief(value)}" for key, value in figures.items())
        print(f"[{self.elapsed:6.1f}s] {self.phase:<12} {name:<46} {shown}", flush=True)
        return row

    def check(self, name: str, ok: bool, **figures: Any) -> None:
        """Keep the result of a check; only failures are printed, for the output is short of room."""
        with self.lock:
            self.rows.append({"phase": self.phase, "name": name, "ok": bool(ok), **figures})
            if not ok:
                self.wrong.append(f"{self.phase}: {name}")
        if not ok:
            shown = "  ".join(f"{key}={brief(value)}" for key, value in figures.items())
            print(f"[{self.elapsed:6.1f}s] {self.phase:<12} WRONG {name}  {shown}", flush=True)

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Do one part of a phase; what it raises is noted, and the next part can go on."""
        try:
            return call()
        except Skip as reason:
            self.note(name, skipped=str(reason))
        except Exception as error:
            self.fail(name, error)
        return None

    def fail(self, name: str, error: BaseException) -> None:
        """Note an error; raise it again if the device is of no use any more."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        with self.lock:
            self.rows.append({"phase": self.phase, "name": name, "error": text})
            self.wrong.append(f"{self.phase}: {name}")
        print(f"[{self.elapsed:6.1f}s] {self.phase:<12} ERROR {name}  {text}", flush=True)
        traceback.print_exc(limit=-4)
        if not self.device_works():
            raise DeviceLost from error

    def find(self, phase: str, name: str) -> dict[str, Any] | None:
        """The last result of that name."""
        for row in reversed(self.rows):
            if row["phase"] == phase and row["name"] == name:
                return row
        return None

    def save(self, **more: Any) -> None:
        """Write what there is."""
        if self.output is None:
            return
        with self.lock:
            data = {
                **self.header,
                "seconds": self.elapsed,
                "phases": self.phases,
                "wrong": self.wrong,
                "left_out": self.left_out,
                **more,
            }
            text = json.dumps({**data, "rows": self.rows}, indent=1, default=str)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        part = self.output.with_suffix(".part")
        part.write_text(text + "\n")
        os.replace(part, self.output)

    # -- device -----------------------------------------------------------------------------------------------

    def backend(self, **options: Any) -> Any:
        """A new FlashInfer backend, or one on its double."""
        from radixkv.attention.flashinfer_backend import FlashInferBackend

        if self.double is not None:
            return FlashInferBackend(self.device, module=self.double, workspace_bytes=1024, **options)
        return FlashInferBackend(self.device, **options)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def device_works(self) -> bool:
        try:
            torch.ones(1, device=self.device).sum().item()
        except Exception:
            return False
        return True

    def tidy(self) -> None:
        """Give back what a phase has left lying about."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


class DeviceLost(Exception):
    """An error that leaves CUDA unusable in this process."""


def brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_phases(session: Session, phases: list[Phase]) -> list[str]:
    """Run them one after the other, whatever one of them raises.

    Returns:
        Names of those that are left because CUDA is of no use any more in this process.
    """
    scale = (session.limit - WATCHDOG_MARGIN - session.elapsed) / sum(phase.seconds for phase in phases)
    end = session.elapsed
    for index, phase in enumerate(phases):
        end += phase.seconds * scale
        session.phase, session.deadline = phase.name, end
        began, status, error = session.elapsed, "done", None
        lost = False
        session.phases[phase.name] = {"status": "running"}
        try:
            phase.run(session)
        except Skip as reason:
            status, error = "skipped", str(reason)
        except DeviceLost:
            status, error, lost = "failed", "CUDA is of no use any more in this process", True
        except Exception as raised:
            status, error = "failed", f"{type(raised).__name__}: {raised}"[:500]
            traceback.print_exc(limit=-6)
            lost = not session.device_works()
        session.phases[phase.name] = {"status": status, "seconds": round(session.elapsed - began, 1)}
        if error is not None:
            session.phases[phase.name]["error"] = error
            print(f"[{session.elapsed:6.1f}s] {phase.name:<12} {status.upper()}: {error}", flush=True)
        session.save()
        if lost:
            return [later.name for later in phases[index + 1 :]]
        session.tidy()
    return []


def start_watchdog(session: Session, finish: Callable[[str], None]) -> threading.Event:
    """Shortly before the limit, write what there is and end the process, whatever the main thread is stuck in.

    Returns:
        Set it, and nothing more happens.
    """
    over = threading.Event()

    def watch() -> None:
        while (left := session.limit - WATCHDOG_MARGIN - session.elapsed) > 0:
            if over.wait(min(left, 1.0)):
                return
        session.phases.setdefault(session.phase, {})["status"] = "cut off"
        try:
            finish(f"cut off after {session.elapsed:.0f} s, in {session.phase}")
            sys.stdout.flush()
        finally:
            os._exit(4)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    return over
