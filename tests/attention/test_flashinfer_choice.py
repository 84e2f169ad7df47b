"""Which backend is taken, why, and what is said where FlashInfer cannot be had."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

from radixkv.attention import FlashInferBackend, TorchBackend, backend_choice, flashinfer_choice, make_backend
from radixkv.attention.flashinfer_choice import import_flashinfer, version_problem
from radixkv.core.errors import InvalidRequestError, install_hint


@pytest.fixture
def gpu(monkeypatch):
    """As if there were an H100."""
    found = {"available": True, "capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found["available"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return found


@pytest.fixture
def package(monkeypatch):
    """As if this were the package `flashinfer`."""
    module = ModuleType("flashinfer")
    module.__version__ = "0.6.13"
    module.__spec__ = flashinfer_choice.importlib.util.spec_from_loader("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.fixture
def no_package(monkeypatch):
    find_spec = flashinfer_choice.importlib.util.find_spec

    def found(name, *args):
        return None if name == "flashinfer" else find_spec(name, *args)

    monkeypatch.setattr(flashinfer_choice.importlib.util, "find_spec", found)


def test_on_a_cpu_it_is_torch_without_a_word(caplog):
    assert backend_choice("cpu") == ("torch", "FlashInfer needs an NVIDIA GPU, and the device is cpu")
    assert isinstance(make_backend("auto", "cpu"), TorchBackend)
    assert not caplog.records


def test_a_gpu_and_the_package(gpu, package):
    assert backend_choice("cuda") == ("flashinfer", "FlashInfer 0.6.13 on Some GPU")
    assert import_flashinfer() is package


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"available": False}, "torch finds none"),
        ({"capability": (7, 5)}, "8.0 (Ampere) or newer, and Some GPU has 7.5"),
    ],
)
def test_a_gpu_that_is_none_or_too_old(gpu, package, caplog, change, message):
    gpu.update(change)
    name, reason = backend_choice("cuda:0")
    assert name == "torch"
    assert message in reason
    with pytest.raises(InvalidRequestError) as raised:
        make_backend("flashinfer", "cuda:0")
    assert str(raised.value).startswith('attention="flashinfer": ')
    assert message in str(raised.value)
    with caplog.at_level(logging.WARNING, "radixkv.attention"):
        assert isinstance(make_backend("auto", "cuda:0"), TorchBackend)
    (record,) = caplog.records
    assert message in record.getMessage()


def test_the_package_is_missing(gpu, no_package, caplog):
    name, reason = backend_choice("cuda")
    assert (name, reason) == ("torch", f"FlashInfer is not installed: {install_hint('cuda')}")
    with pytest.raises(InvalidRequestError, match="not installed: install the extra"):
        make_backend("flashinfer", "cuda")
    assert isinstance(make_backend("auto", "cuda"), TorchBackend)
    (record,) = caplog.records
    assert "not installed" in record.getMessage()


@pytest.mark.parametrize("version", ["0.6.12", "0.5.0", "0.8.0", "1.0", "unknown", ""])
def test_a_version_that_nobody_knows(gpu, package, version):
    package.__version__ = version
    name, reason = backend_choice("cuda")
    assert name == "torch"
    assert "not known to radixkv, which knows 0.6.13 up to, not including, 0.8" in reason
    with pytest.raises(InvalidRequestError, match="not known to radixkv"):
        make_backend("flashinfer", "cuda")


@pytest.mark.parametrize("version", ["0.6.13", "0.6.18.post1", "0.7.0rc1", "0.7.4", "0.7.4+cu130"])
def test_versions_that_are_known(version):
    assert version_problem(version) is None


def test_a_package_that_cannot_be_imported(gpu, monkeypatch, tmp_path):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')\n")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, reason = backend_choice("cuda")
    assert name == "torch"
    assert "cannot be imported (OSError: libcudart.so.13: cannot open)" in reason


def test_asked_for_on_a_cpu():
    with pytest.raises(InvalidRequestError, match='the device is cpu; attention="torch" runs anywhere'):
        make_backend("flashinfer", "cpu")
    with pytest.raises(InvalidRequestError, match="needs an NVIDIA GPU"):
        FlashInferBackend("cpu")


def test_the_package_is_not_imported_where_it_cannot_be_used():
    import subprocess

    code = (
        "import sys, radixkv.attention as a; a.make_backend('auto', 'cpu'); a.FlashInferBackend; "
        "assert not {'flashinfer', 'triton', 'tvm_ffi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
