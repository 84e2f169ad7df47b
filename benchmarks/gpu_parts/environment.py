"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

from gpu_parts.session import Session


def describe(session: Session) -> dict[str, Any]:
    """The header of the results."""
    from common import commit, cpu_name

    found: dict[str, Any] = {
        "benchmark": "gpu",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "dtype": str(session.dtype).removeprefix("torch."),
        "small": session.small,
        "double": session.double is not None,
        "device": str(session.device),
    }
    for package in ("radixkv", "transformers", "triton", "flashinfer-python", "flash-attn", "kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if session.on_gpu:
        properties = torch.cuda.get_device_properties(session.device)
        free, total = torch.cuda.mem_get_info(session.device)
        found |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_gib": round(total / 2**30, 1),
            "gpu_free_gib": round(free / 2**30, 1),
            "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
            "nvidia_smi": _nvidia_smi(),
        }
    return found


def _nvidia_smi() -> str | None:
    """Driver, clocks and power limit, or None."""
    fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.max,pcie.link.width.max"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0]


def environment(session: Session) -> None:
    """Versions, device, and the backend that `attention="auto"` takes."""
    session.header |= describe(session)
    for key, value in session.header.items():
        print(f"    {key:<20} {value}")
    try:
        from radixkv.attention.flashinfer_choice import backend_choice
    except ImportError as error:
        session.fail("choice of backend", error)
        return
    name, reason = backend_choice(session.device)
    session.note("attention='auto'", backend=name, reason=reason)
    backend = session.attempt("make the FlashInfer backend", session.backend)
    if backend is not None:
        version = getattr(session.double or backend.module, "__version__", "?")
        session.header["flashinfer"] = version
        session.note("FlashInfer", version=version, double=session.double is not None)
