"""What the user of the demo can do wrong or be missing; the command line prints it in one line."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on, for a reason the user can act on: one line that says what to do."""
