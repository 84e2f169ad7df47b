"""What the page on blocks shows is what the scheduler does: it is run again, watched by other code, and compared."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.tooling.scenes import blocks
from docs.tooling.scenes._blocks_story import HOST_BLOCKS, REQUESTS, WORDS
from radixkv import BlockPool, RadixTree, Scheduler, SchedulerConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "interactive" / "blocks.md"
BLOCK, SLAB = 4, 64
CHOICES = [(mode, share, keep) for mode in ("recompute", "swap") for share in (1, 0) for keep in (1, 0)]
NOBODY = {"state": "-", "known": 0, "computed": 0, "table": [], "host": []}


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    """The file of the site."""
    text = blocks.make()
    assert len(text) < 400_000
    return json.loads(text.removeprefix("window.radixkvBlocks = ").removesuffix(";\n"))


# -- reading what is shipped ---------------------------------------------------------------------------------


def whole_run(data: dict[str, Any], run: int) -> list[int]:
    other, common, *own = data["runs"][run]
    return (whole_run(data, other)[:common] if common else []) + own


def decoded(data: dict[str, Any], pool: int, mode: str, share: int, keep: int) -> list[dict[str, Any]]:
    """All states of a setting, from before the first step."""
    value = {digit: i for i, digit in enumerate(data["digits"])} | {"~": -1}
    now = {"requests": [dict(NOBODY)] * 6, "cached": {}, "counters": dict.fromkeys(data["counters"], 0)}
    states = [now | {"events": []}]
    run = data["settings"][f"{mode}{share}{keep}"][pool - data["pool"]["min"]]
    for step in (data["steps"][number] for number in whole_run(data, run)):
        requests, cached, counters = list(now["requests"]), dict(now["cached"]), dict(now["counters"])
        events, told = [], set()
        for part in step.split(",") if step else []:
            kind, rest = part[0], part[1:]
            if kind == ">":
                events.append(data["events"][int(rest)])
            elif kind == "!":
                for block, writer, logical, rows in zip(*[map(value.get, rest)] * 4, strict=True):
                    cached[block] = (writer, logical, rows)
                    if not rows:
                        del cached[block]
            elif kind == "#":
                for place, a, b, c in zip(*[map(value.get, rest)] * 4, strict=True):
                    counters[data["counters"][place]] = (a * 64 + b) * 64 + c
            else:
                rid = int(kind)
                told.add(rid)
                was = requests[rid]
                if rest.startswith("+"):
                    requests[rid] = advanced(was, [value[digit] for digit in rest[1:]])
                elif rest != "=":
                    own, _, host = rest.partition(".")
                    known, computed, *table = (value[digit] for digit in own[1:])
                    requests[rid] = {"state": own[0], "known": known, "computed": computed, "table": table}
                    requests[rid]["host"] = [value[digit] for digit in host]
        for rid, request in enumerate(requests):
            if request["state"] == "R" and rid not in told:
                requests[rid] = advanced(request, [])
        now = {"requests": requests, "cached": cached, "counters": counters}
        states.append(now | {"events": events})
    return states


def advanced(request: dict[str, Any], blocks: list[int]) -> dict[str, Any]:
    more = {"known": request["known"] + 1, "computed": request["computed"] + 1}
    return request | more | {"table": request["table"] + blocks}


# -- running it again ----------------------------------------------------------------------------------------


class Again:
    """The six requests on the scheduler, and what can be counted by looking at tables, tokens and the tree's nodes."""

    def __init__(self, pool: int, mode: str, share: int, keep: int) -> None:
        self.pool = BlockPool(pool)
        self.tree = RadixTree(self.pool, block_size=BLOCK)
        self.share, self.keep = bool(share), bool(keep and share)
        config = SchedulerConfig(
            max_num_seqs=6,
            max_batched_tokens=384,
            preemption=mode,
            watermark=0,
            share_prefixes=bool(share),
            keep_cached=bool(keep),
        )
        host = BlockPool(HOST_BLOCKS) if mode == "swap" else None
        self.scheduler = Scheduler(self.tree, config, host_pool=host)
        self.texts = [[WORDS.index(word) for word in asked.text] for asked in REQUESTS]
        self.seqs: dict[int, Any] = {}
        self.peak = [0] * 6
        self.recomputed = 0

    def states(self) -> Iterator[dict[str, Any]]:
        yield self.look([])
        number = 0
        while len(self.seqs) < 6 or self.scheduler.has_unfinished:
            number += 1
            yield self.look(self.step(number))

    def step(self, number: int) -> list[tuple[str, list[int]]]:
        """One step; kinds of events, and whose they are."""
        come = [rid for rid, asked in enumerate(REQUESTS) if asked.arrives == number]
        for rid in come:
            prompt = self.texts[rid][: len(REQUESTS[rid].prompt)]
            request = self.scheduler.add(prompt, max_new_tokens=len(REQUESTS[rid].answer), rid=rid)
            (self.seqs[rid],) = request.sequences
        ran = {rid: len(self.table(rid)) for rid, seq in self.seqs.items() if seq.state == "running"}
        evicted = self.tree.num_evicted_blocks_total
        step = self.scheduler.schedule()
        assert step is not None
        events = [("preempt", [seq.request.rid]) for seq in step.preempted]
        if self.keep and self.tree.num_evicted_blocks_total > evicted:
            events.append(("evict", []))
        grown = [rid for rid, had in ran.items() if len(self.table(rid)) > had]
        if grown:
            events.append(("grow", grown))
        entries = {self.rid_of(row): entry for entry, row in enumerate(step.rows.tolist())}
        events += [("wait", [rid]) for rid in come if rid not in entries]
        for seq in step.admitted:
            prefix = step.query_lens[entries[seq.request.rid]] < len(seq.request.tokens)
            events.append(("share" if prefix else "start", [seq.request.rid]))
        events += [("resume", [seq.request.rid]) for seq in step.resumed]
        for rid, entry in entries.items():
            at = step.positions[step.query_starts[entry] : step.query_starts[entry + 1]]
            self.recomputed += int((at < self.peak[rid]).sum())
        tokens = [self.texts[seq.request.rid][seq.num_tokens] for seq in step.sampling_seqs]
        done = self.scheduler.complete(step, tokens)
        self.scheduler.check(exclusive=True)
        self.tree.check()
        return events + [("end", [seq.request.rid]) for seq in done.finished]

    def rid_of(self, row: int) -> int:
        return self.scheduler.sequence(row).request.rid

    def table(self, rid: int) -> list[int]:
        return self.seqs[rid].block_table.tolist() if rid in self.seqs else []

    def look(self, events: list[tuple[str, list[int]]]) -> dict[str, Any]:
        requests = [dict(NOBODY) for _ in range(6)]
        for rid, seq in self.seqs.items():
            requests[rid] = {
                "state": seq.state[0].upper(),
                "known": seq.num_tokens,
                "computed": 0 if seq.state == "finished" else seq.num_computed,
                "table": self.table(rid),
                "host": seq.host_blocks.tolist(),
            }
            if seq.state == "running":
                self.peak[rid] = max(self.peak[rid], seq.num_computed)
        filled: dict[int, int] = {}
        for request in requests:
            for logical, block in enumerate(request["table"]):
                rows = min(BLOCK, request["computed"] - BLOCK * logical)
                assert filled.setdefault(block, rows) == rows
        cached, paths = self.tree_contents()
        in_tables = [request for request in requests if request["table"]]
        counters = {
            "used": len(filled),
            "cached": len(cached.keys() - filled.keys()),
            "slack": sum(BLOCK - rows for rows in filled.values()),
            "contiguous": sum(SLAB - request["computed"] for request in in_tables),
            "shared": sum(request["computed"] for request in in_tables) - sum(filled.values()),
            "to_recompute": sum(self.lost(rid, request, paths) for rid, request in enumerate(requests)),
            "recomputed": self.recomputed,
        }
        return {"requests": requests, "cached": cached, "counters": counters, "events": events}

    def tree_contents(self) -> tuple[dict[int, tuple[int, list[int]]], list[list[int]]]:
        """Each cached block's place in its text and tokens, and all cached texts."""
        cached, paths = {}, []
        for node in self.tree.nodes():
            tokens = node.tokens.tolist()
            paths.append((paths[node.parent] if node.parent >= 0 else []) + tokens)
            for i, block in enumerate(node.blocks.tolist()):
                cached[block] = (node.start // BLOCK + i, tokens[i * BLOCK : (i + 1) * BLOCK])
        return cached, paths

    def lost(self, rid: int, request: dict[str, Any], paths: list[list[int]]) -> int:
        if request["state"] not in "WS":
            return 0
        # The last known token has no KV: it was never computed.
        text = self.texts[rid][: request["known"] - 1]
        have = max((common_prefix(text, path) for path in paths), default=0) if self.share else 0
        logical = have // BLOCK
        while logical < len(request["host"]) and request["host"][logical] >= 0:
            logical += 1
            have = max(have, min(BLOCK * logical, request["computed"]))
        return max(0, self.peak[rid] - have)


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))  # noqa: B905


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice)))
def test_every_step_of_every_recording_is_what_the_scheduler_does(
    shipped: dict[str, Any], choice: tuple[str, int, int]
) -> None:
    for pool in range(shipped["pool"]["min"], shipped["pool"]["max"] + 1):
        again = Again(pool, *choice)
        recorded = decoded(shipped, pool, *choice)
        states = list(again.states())
        assert len(states) == len(recorded)
        for number, (state, shown) in enumerate(zip(states, recorded, strict=True)):
            where = (pool, *choice, number)
            assert shown["requests"] == state["requests"], where
            assert shown["counters"] == state["counters"], where
            assert [(kind, rids) for kind, rids, _ in shown["events"]] == state["events"], where
            # A cached block holds the tokens of whoever is said to have written it.
            assert shown["cached"].keys() == state["cached"].keys(), where
            for block, (writer, logical, rows) in shown["cached"].items():
                text = again.texts[writer][BLOCK * logical : BLOCK * logical + rows]
                assert state["cached"][block] == (logical, text), (where, block)


def test_all_six_finish_everywhere_and_the_range_of_pools_is_as_told(shipped: dict[str, Any]) -> None:
    pools = shipped["pool"]
    assert pools["min"] <= 12 < pools["value"] == 28 < pools["max"]
    preempted = {}
    for pool in range(pools["min"], pools["max"] + 1):
        for choice in CHOICES:
            states = decoded(shipped, pool, *choice)
            assert all(request["state"] == "F" for request in states[-1]["requests"])
            events = [event for state in states for event in state["events"]]
            preempted[pool, choice] = sum(kind == "preempt" for kind, _, _ in events)
    assert not any(preempted[pools["max"], choice] for choice in CHOICES)
    assert any(preempted[pools["max"] - 1, choice] for choice in CHOICES)
    for pool in (pools["min"], 16, 20):
        assert all(preempted[pool, choice] for choice in CHOICES)
    assert all(preempted[28, choice] for choice in CHOICES)
    # In a smaller pool somebody is cut short.
    cut = Again(pools["min"] - 1, "recompute", 1, 1)
    assert list(cut.states())
    assert any(seq.finish_reason == "capacity" for seq in cut.seqs.values())


def test_request_2_shares_whole_blocks_and_copies_the_rest(shipped: dict[str, Any]) -> None:
    before, after = decoded(shipped, 28, "recompute", 1, 1)[4:6]
    zero, two = after["requests"][0], after["requests"][2]
    assert before["requests"][2]["state"] == "-"
    assert two["table"][:3] == zero["table"][:3]
    assert two["table"][3] not in zero["table"]
    assert [event[2] for event in after["events"]] == [
        "Request 2 starts with a prefix that is cached: it shares blocks 0 to 2, copies 2 tokens into block 8, "
        "and computes 1 prompt token."
    ]


def test_the_victim_is_the_request_that_arrived_last_of_those_that_run(shipped: dict[str, Any]) -> None:
    for pool in range(shipped["pool"]["min"], shipped["pool"]["max"]):
        for choice in CHOICES:
            states = decoded(shipped, pool, *choice)
            for was, now in itertools.pairwise(states):
                victims = [rids[0] for kind, rids, _ in now["events"] if kind == "preempt"]
                runs = [rid for rid, request in enumerate(was["requests"]) if request["state"] == "R"]
                assert victims == sorted(runs)[::-1][: len(victims)]


def test_the_host_tier_is_never_too_small(shipped: dict[str, Any]) -> None:
    for pool in range(shipped["pool"]["min"], shipped["pool"]["max"]):
        for state in decoded(shipped, pool, "swap", 1, 1):
            used = [block for request in state["requests"] for block in request["host"] if block >= 0]
            assert len(used) == len(set(used)) <= HOST_BLOCKS
            assert not any(
                r["state"] == "W" and r["known"] > len(REQUESTS[i].prompt)
                for i, r in enumerate(state["requests"])
            )


MOMENTS = {
    "Request 2 joins: it shares three blocks of request 0": ("share", [2]),
    "Request 5 takes over what request 1 has left behind": ("share", [5]),
    "The pool is full: request 5 is preempted": ("preempt", [5]),
    "Swap instead of recompute": ("preempt", [5]),
    "Twelve blocks are enough for all six": ("preempt", [2]),
    "Nothing shared": ("start", [2]),
}


def test_the_moments_that_the_page_points_to_are_as_it_says(shipped: dict[str, Any]) -> None:
    links = re.findall(r'<li><a href="#([^"]*)">(.*?)</a></li>', PAGE.read_text())
    assert [text for _, text in links] == list(MOMENTS)
    for address, text in links:
        at = dict(part.split("=") for part in address.replace("&amp;", "&").split("&"))
        states = decoded(shipped, int(at["pool"]), at["mode"], int(at["share"]), int(at["keep"]))
        found = [(kind, rids) for kind, rids, _ in states[int(at["step"])]["events"]]
        assert MOMENTS[text] in found, text
    assert shipped["pool"]["min"] == 12


def test_numbers_in_the_text_of_the_page_are_those_of_the_recording(shipped: dict[str, Any]) -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"the host tier, {HOST_BLOCKS} blocks of ordinary memory here" in text
    assert f"*slab* of its own, {shipped['slab']} neighbouring slots" in text
    assert "14 of its 15 prompt tokens have their KV already" in text
    assert len(REQUESTS[2].prompt) == 15
    assert REQUESTS[2].prompt == REQUESTS[0].prompt
    assert REQUESTS[5].prompt[: len(REQUESTS[1].text)] == REQUESTS[1].text
    assert max(len(asked.text) for asked in REQUESTS) <= SLAB
