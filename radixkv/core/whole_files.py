"""Files that are written as a whole, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; at the end of the block, what is there takes the place of `path`.

    If the block ends with an exception, `path` is as it was. The file has the rights that any new file gets.

    Args:
        path: The file to write or replace.

    Raises:
        OSError: It cannot be written there.
    """
    whole = path.absolute()
    part = whole.with_name(f".{whole.stem[:40]}-{secrets.token_hex(6)}{whole.suffix}")
    # The umask is left to the system: to read it, a process has to change it, for all its threads.
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield part
        os.replace(part, whole)
    finally:
        part.unlink(missing_ok=True)
