"""What `radixkv info` shows."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Shown with their version, or as missing.
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "xxhash",
    "sortedcontainers",
    "flashinfer-python",
    "apache-tvm-ffi",
)


def collect() -> dict[str, Any]:
    """Versions, devices, memory, default pool sizes, attention backends, as plain values for JSON."""
    import torch

    import radixkv
    from radixkv.demo.weights import cache_root

    devices = [_device("cpu", platform.processor() or platform.machine())]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            devices.append(_device(f"cuda:{index}", torch.cuda.get_device_name(index)))
    return {
        "radixkv": radixkv.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "packages": {name: _version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "cpu_cores": os.cpu_count(),
        "cache_folder": str(cache_root()),
        "devices": devices,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(device: str, name: str) -> dict[str, Any]:
    import psutil
    import torch

    from radixkv.attention import backend_choice
    from radixkv.store.sizing import DEFAULT_FRACTION, free_memory_bytes

    kind = torch.device(device).type
    if kind == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = psutil.virtual_memory().total
    free = free_memory_bytes(device)
    fraction = DEFAULT_FRACTION.get(kind, DEFAULT_FRACTION["cpu"])
    attention, reason = backend_choice(device)
    return {
        "device": device,
        "name": name,
        "total_bytes": int(total),
        "free_bytes": free,
        "default_pool_bytes": int(free * fraction),
        "default_pool_fraction": fraction,
        "attention": attention,
        "attention_reason": reason,
    }


def print_tables(found: dict[str, Any]) -> None:
    """The same for people."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from radixkv.demo.report import make_console
    from radixkv.store.sizing import format_bytes

    console = make_console()
    versions = Table(box=box.ROUNDED, show_header=False)
    versions.add_column(style="bold")
    versions.add_column(overflow="fold")
    for name in ("radixkv", "python", "platform"):
        versions.add_row(name, found[name])
    for name, number in found["packages"].items():
        versions.add_row(name, number or "[dim]not installed[/dim]")
    versions.add_row("threads", f"{found['threads']} of {found['cpu_cores']} cores")
    versions.add_row("cache folder", found["cache_folder"])
    console.print(versions, highlight=False)
    devices = Table(box=box.ROUNDED, header_style="bold")
    devices.add_column("Device", style="bold")
    devices.add_column("Name", overflow="fold")
    for name in ("Memory", "Free", "Default pool"):
        devices.add_column(name, justify="right", no_wrap=True)
    for device in found["devices"]:
        pool = f"{format_bytes(device['default_pool_bytes'])} ({device['default_pool_fraction']:.0%})"
        sizes = format_bytes(device["total_bytes"]), format_bytes(device["free_bytes"]), pool
        devices.add_row(device["device"], device["name"], *sizes)
    console.print(devices)
    for device in found["devices"]:
        name, reason = device["attention"], escape(device["attention_reason"])
        console.print(f"attention on {device['device']}: [bold]{name}[/bold] ({reason})", highlight=False)
