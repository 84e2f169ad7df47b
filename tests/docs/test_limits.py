"""The page of limits names every reason for which a call is passed through, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from radixkv.hf.calls import WHY

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"


def test_the_table_of_reasons_is_complete():
    table = re.search(r"^\| reason \|.*?\n\n", PAGE.read_text(), re.M | re.S)[0]
    named = {
        name for row in table.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == set(WHY)
