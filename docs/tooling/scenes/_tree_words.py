"""What happened, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from docs.tooling.scenes._tree_examples import BLOCK_SIZE
from radixkv import InsertResult
from radixkv.core import Tail

if TYPE_CHECKING:
    from docs.tooling.scenes._tree_run import State

Cut = tuple[list[str], int, int]

_FIRST_TO_GO = {
    "lru": "the least recently used leaf",
    "fifo": "the leaf cached longest ago",
    "lfu": "the least often used leaf",
}


def number_of(num: int, what: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{num} {what}" if num == 1 else f"{num} {what}s"


def ids(blocks: Sequence[int]) -> str:
    """`block 3`, `blocks 3, 4 and 7`."""
    *rest, last = blocks
    if not rest:
        return f"block {last}"
    return f"blocks {', '.join(map(str, rest))} and {last}"


def _quoted(words: Sequence[str]) -> str:
    return f"“{' '.join(words)}”"


def _were(num: int) -> str:
    return "was" if num == 1 else "were"


def _request(number: int) -> str:
    return f"request {number + 1}"


def start(num_blocks: int, block_size: int) -> str:
    return f"The pool has {num_blocks} blocks of {block_size} tokens. All are free: the tree is empty."


def blocks_and_rows(whole: int, rows: int, last: str) -> str:
    parts = [number_of(whole, "block")] if whole else []
    if rows:
        parts.append(f"{number_of(rows, 'row')} of {last}")
    return " and ".join(parts)


def typed(word: str, pasted: int, hit: int, num: int, whole: int, rest: int) -> str:
    what = f"Pasted {number_of(pasted, 'word')}" if pasted else f"Typed “{word}”"
    if not hit:
        return f"{what}: nothing of it is cached."
    where = blocks_and_rows(whole, rest, "another" if whole else "a block")
    much = "all" if hit == num else f"the first {hit}"
    return f"{what}: {much} of {number_of(num, 'token')} {'is' if hit == num == 1 else 'are'} cached, in {where}."


def matched(number: int, hit: int, num: int, whole: int, tail: Tail | None, limited: bool) -> str:
    rest = number_of(num - hit, "token")
    if not hit:
        return f"Request {number + 1} was sent. Nothing of it is cached: all {rest} must be computed."
    text = f"Request {number + 1} was sent. The first {hit} of {num} tokens were cached: {num - hit} to compute. "
    held = blocks_and_rows(whole, tail.num_rows, f"block {tail.block}") if tail else number_of(whole, "block")
    text += f"It holds {held}, which cannot be evicted now."
    if limited:
        text += " (The last token is always computed: it gives the first token of the answer.)"
    return text


def allocated(
    number: int, free: int, own: Sequence[int], cuts: Sequence[Cut], merged: bool, policy: str
) -> str:
    taken = f"{ids(own)} for {_request(number)}"
    if not cuts:
        return f"Took {taken}: {number_of(free, 'block')} {_were(free)} free."
    parts = []
    for words, num, had in cuts:
        leaf = "the next one" if parts else _FIRST_TO_GO[policy]
        much = "whole" if num == had else f"last {num if num > 1 else 'one'} of {had} blocks"
        part = f"the {much} of {leaf}"
        parts.append(f"{_quoted(words)}, {part}")
    lack = "No block was free" if not free else f"Only {number_of(free, 'block')} {_were(free)} free"
    evicted = number_of(sum(num for _, num, _ in cuts), "block")
    text = f"{lack}: evicted {evicted}, {'; then '.join(parts)}. Took {taken}."
    if merged:
        text += " A node was left with one child: the two became one."
    return text


def computed(number: int, num: int, copied: tuple[Tail, int] | None) -> str:
    text = ""
    if copied is not None:
        tail, to = copied
        text = (
            f"Copied {number_of(tail.num_rows, 'row')} of block {tail.block} to block {to} (copy-on-write), "
            f"and let go of block {tail.block}. "
        )
    return f"{text}Computed the KV of {number_of(num, 'token')} of {_request(number)}."


def answered(number: int, words: Sequence[str]) -> str:
    return (
        f"The model answered request {number + 1}: {_quoted(words)}. These are {number_of(len(words), 'token')}; "
        "the last has no KV yet. "
    )


def stored(
    number: int,
    act: str,
    before: State,
    after: State,
    result: InsertResult,
    duplicates: Sequence[tuple[int, int]],
    added: Sequence[int],
    gone: Sequence[int],
    split: tuple[int, tuple[int, int]] | None,
) -> str:
    parts = []
    if split is not None:
        num, (above, _) = split
        upper = next(node for node in after.nodes if node.blocks[-1] == above)
        parts.append(f"Edge of {num} blocks split after {len(upper.blocks)}")
    if duplicates:
        olds = [old for old, _ in duplicates]
        news = [new for _, new in duplicates]
        parts.append(
            f"{ids(olds).capitalize()} held what {ids(news)} {'holds' if len(news) == 1 else 'hold'} already: "
            f"freed as {'a duplicate' if len(olds) == 1 else 'duplicates'}"
        )
    if result.num_new_tokens:
        parts.append(_grown(before, after, result, added, gone))
    elif not duplicates:
        parts.append("All was in the tree already")
    what = "Prompt" if act == "insert" else "Prompt and answer"
    return f"{what} of {_request(number)} inserted. " + ". ".join(parts) + "."


def _grown(
    before: State, after: State, result: InsertResult, added: Sequence[int], gone: Sequence[int]
) -> str:
    """A new leaf, or an old one that goes on."""
    tokens = number_of(result.num_new_tokens, "token")
    old = {node.blocks[0]: node for node in before.nodes}
    grown = next(
        (
            (old[node.blocks[0]], node)
            for node in after.nodes
            if node.blocks[0] in old and node.end > old[node.blocks[0]].end
        ),
        None,
    )
    if grown is not None:
        was, _ = grown
        if gone:
            return f"Leaf continued by {tokens}: {ids(added)} took the place of its tail, {ids(gone)}"
        if (was.end - was.start) % BLOCK_SIZE:
            more = f" and {ids(added)}" if added else ""
            return f"Leaf continued by {tokens}: its tail, block {was.blocks[-1]}, filled further{more}"
        return f"Leaf continued by {tokens}: {ids(added)}"
    if gone:
        return f"{ids(added).capitalize()} with {tokens} more took the place of a tail, {ids(gone)}"
    return f"New leaf of {number_of(len(added), 'block')} with {tokens}"


def released(number: int, num: int) -> str:
    return f"Request {number + 1} ended and let go of its blocks. " + (
        f"{number_of(num, 'block')} can be evicted again." if num else "Others still hold them all."
    )
