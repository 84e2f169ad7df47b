"""Plug-in for Hugging Face transformers: the only layer that imports it."""

from radixkv.hf.plug import HFPlug
from radixkv.hf.support import probe_model

__all__ = ["HFPlug", "probe_model"]
