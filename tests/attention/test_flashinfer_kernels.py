"""The kernels that the backend names for usual models compile for Hopper, with nvcc and without a GPU. Minutes.

Skipped where nvcc, ninja or FlashInfer is missing. RADIXKV_KERNELS=all compiles all that are named, not just a sample.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixkv.attention import AttentionSpec
from radixkv.attention.flashinfer_kinds import kernel_modules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BF16, FP16 = torch.bfloat16, torch.float16
USUAL = {
    "Llama 3 8B": [AttentionSpec(32, 8, 128, 128, 128**-0.5)],
    "Gemma 3 270M": [
        AttentionSpec(4, 1, 256, 256, 1 / 16),
        AttentionSpec(4, 1, 256, 256, 1 / 16, window=512),
    ],
    "Gemma 2 9B": [
        AttentionSpec(16, 8, 256, 256, 1 / 16, softcap=50.0),
        AttentionSpec(16, 8, 256, 256, 1 / 16, window=4096, softcap=50.0),
    ],
    "heads of 64, no groups": [AttentionSpec(12, 12, 64, 64, 1 / 8)],
}
NAMED = sorted({str(m) for specs in USUAL.values() for m in kernel_modules(specs, BF16)})
SAMPLE = ["cascade", "decode:bf16:64", "fa2:bf16:64"]  # one of each kind

# In a process of its own: FlashInfer reads the environment when it is imported.
SCRIPT = """
import sys
import torch
from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.core import build_jit_specs

def spec(name):
    if name == "cascade":
        return gen_cascade_module()
    kind, dtype, dim, *flags = name.split(":")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    args = (dtype, dtype, dtype, torch.int32, int(dim), int(dim), 0, "swa" in flags, "cap" in flags)
    if kind == "decode":
        return gen_batch_decode_module(*args)
    return gen_batch_prefill_module(kind, *args, False)

specs = [spec(name) for name in sys.argv[1:]]
build_jit_specs(specs, skip_prebuilt=False)
for name, one in zip(sys.argv[1:], specs):
    print(name, one.jit_library_path.stat().st_size)
"""


def cuda_home():
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and str(Path(nvcc).resolve().parents[1])]
    places += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    return next((p for p in places if p and (Path(p) / "include/cuda_runtime.h").exists()), None)


def test_names_are_those_that_a_build_takes():
    assert NAMED == [
        "cascade",
        "decode:bf16:256:cap",
        "decode:bf16:64",
        "fa2:bf16:128",
        "fa2:bf16:256",
        "fa2:bf16:256:cap",
        "fa2:bf16:256:swa",
        "fa2:bf16:256:swa:cap",
        "fa2:bf16:64",
    ]
    assert set(SAMPLE) <= set(NAMED)
    assert [str(m) for m in kernel_modules(USUAL["Llama 3 8B"], FP16)] == ["cascade", "fa2:fp16:128"]


def test_they_compile_for_hopper(tmp_path):
    missing = [tool for tool in ("nvcc", "ninja", "cc") if shutil.which(tool) is None]
    missing += [name for name in ("flashinfer", "tvm_ffi") if importlib.util.find_spec(name) is None]
    home = cuda_home()
    if missing or home is None:
        pytest.skip(f"needs {', '.join(missing) or 'the headers of a CUDA toolkit'}")
    # The link line names -lcuda: an empty library stands in where there is no driver.
    (tmp_path / "empty.c").write_text("")
    stub = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so", "empty.c"]
    subprocess.run(stub, check=True, cwd=tmp_path)
    environment = {
        **os.environ,
        "CUDA_HOME": home,
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{tmp_path}",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())),
    }
    names = NAMED if os.environ.get("RADIXKV_KERNELS") == "all" else SAMPLE
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *names],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    built = dict(line.split() for line in done.stdout.splitlines() if line.split(" ")[0] in names)
    assert list(built) == names
    assert all(int(size) > 10_000 for size in built.values())
