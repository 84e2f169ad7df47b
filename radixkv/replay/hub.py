"""Models that are named by their hub id: an end in seconds where there is no network."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["hub_options", "not_reached"]


def hub_options(name: str) -> dict[str, Any]:
    """What `from_pretrained` is to be given for a hub id: nothing, or to look at files on this machine only.

    The hub is asked once, without the retries of `from_pretrained`, which last most of a minute.
    """
    try:
        url = importlib.import_module("huggingface_hub").hf_hub_url(name, "config.json")
        # Its own functions try again, in some versions; any answer will do, also that there is no such model.
        importlib.import_module("huggingface_hub.utils").get_session().head(url, timeout=10)
    except Exception as error:  # of several HTTP clients, whose errors have no common base
        if isinstance(error, OSError) or any(c.__name__ == "TransportError" for c in type(error).__mro__):
            return {"local_files_only": True}
    return {}


def not_reached(options: dict[str, Any], what: str) -> str:
    """The end of a message about a model that cannot be loaded with these options: what to do without a network."""
    return f" (no network, or HF_HUB_OFFLINE is set: give {what})" if options else ""
