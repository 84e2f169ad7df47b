"""The short table at the end, and what was aimed at."""

from __future__ import annotations

from typing import Any

from gpu_parts.session import Session


def targets(session: Session) -> list[tuple[str, str, str, bool | None]]:
    """`(what, wanted, found, reached)`; reached is None where it was not measured."""
    made: list[tuple[str, str, str, bool | None]] = []
    if session.small or session.double is not None:
        return made
    for name in ("64 x 8192", "256 x 8192", "64 x 32768", "256 x 32768"):
        row = session.find("decode", name) or {}
        share = row.get("of_copy")
        made.append((f"decode {name}, share of copy", ">= 0.85", _shown(share), _at_least(share, 0.85)))
    row = session.find("engine", "llama: decode step of 64 rows") or {}
    share = row.get("overhead")
    made.append(
        ("step overhead at batch 64", "< 0.10", _shown(share), None if share is None else share < 0.1)
    )
    for row in session.rows:
        if row["name"].endswith("engine against generate_batch"):
            found = row.get("times_as_fast")
            made.append((row["name"], "> 1", _shown(found), None if found is None else found > 1))
    return made


def _at_least(value: float | None, least: float) -> bool | None:
    return None if value is None else value >= least


def _shown(value: Any) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def lines(session: Session) -> list[str]:
    """For the end of the output."""
    made = ["", "phase         seconds  status"]
    for name, phase in session.phases.items():
        made.append(
            f"{name:<13} {phase.get('seconds', '-'):>7}  {phase['status']}  {phase.get('error', '')}"[:150]
        )
    made += ["", _header(session)]
    for row in session.rows:
        figures = [f"{key} {_figure(row[key])}" for key in _COLUMNS if row.get(key) is not None]
        if figures and "ok" not in row:
            made.append(f"{row['name']:<62} {', '.join(figures)}")
    wanted = targets(session)
    if wanted:
        made += ["", "target"]
        words = {True: "reached", False: "MISSED", None: "unknown"}
        made += [f"{what:<70} {aim:>8}  {found:>12}  {words[ok]}" for what, aim, found, ok in wanted]
    if session.wrong:
        made += ["", f"wrong or failed ({len(session.wrong)}): " + "; ".join(session.wrong[:12])]
    if session.left_out:
        made += ["", f"no time for ({len(session.left_out)}): " + "; ".join(session.left_out[:12])]
    return made


_COLUMNS = (
    "gbs", "of_copy", "of_sdpa", "whole_over_hit", "flat_over_cascade", "rule_chooses", "new_per_s", "ttft_median",
    "times_as_fast", "same", "step_ms", "kernel_ms", "overhead", "plain_ms", "hit_ms", "miss_ms", "floor_ms",
    "ms_per_token", "rounds", "hidden", "value", "passed", "worst_rel",
)  # fmt: skip


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _header(session: Session) -> str:
    header = session.header
    where = header.get("gpu") or header.get("cpu", "?")
    text = f"{where}, torch {header.get('torch')}, FlashInfer {header.get('flashinfer')}, commit {header.get('commit')}"
    if session.double is not None:
        text += ", ON THE TEST DOUBLE: no figure means anything"
    elif session.small:
        text += ", SMALL: no figure means anything"
    return text
