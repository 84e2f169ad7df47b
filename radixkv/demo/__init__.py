"""The demo: real text on a real model, with and without the cache, outputs compared token by token."""

from __future__ import annotations
