"""The four workloads: how prompts share beginnings in practice, and how they do not.

A workload is a generator. It yields one prompt at a time and is sent the answer, because the next turn of a chat
contains the last answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from radixkv.demo import texts

#: One turn of a chat: role ("system", "user" or "assistant") and content.
Message = tuple[str, str]
#: Puts a chat into the model's own format, ready for the next answer.
ChatFormat = Callable[[list[Message]], str]


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        label: A few words for the tables.
        text: The prompt.
        formatted: The text already holds the special tokens that start a prompt.
        max_new_tokens: Stop earlier than the demo's limit, for an answer of one word.
        rounds: Time to first token is the median of so many rounds, each with a cold cache: only for prompts
            that share nothing, where a difference of a few per cent is the question.
    """

    label: str
    text: str
    formatted: bool = False
    max_new_tokens: int | None = None
    rounds: int = 1


PromptStream = Generator[Prompt, str, None]


@dataclass(frozen=True)
class Workload:
    """A named stream of prompts.

    Attributes:
        name: Short and stable: the key in the JSON document.
        title: For people.
        num_requests: How many prompts the stream yields.
        start: Makes the stream.
    """

    name: str
    title: str
    num_requests: int
    start: Callable[[], PromptStream] = field(repr=False)


def plain_chat(messages: list[Message]) -> str:
    """A chat for models without a chat template."""
    names = {"system": "Instructions", "user": "User", "assistant": "Assistant"}
    turns = [f"{names[role]}: {content.strip()}" for role, content in messages]
    return "\n\n".join([*turns, "Assistant:"])


def make_workloads(chat_format: ChatFormat, *, formatted: bool, quick: bool = False) -> list[Workload]:
    """The four workloads, in the order in which the demo runs them.

    Args:
        chat_format: Puts a chat into text.
        formatted: `chat_format` writes the special tokens that start a prompt.
        quick: Fewer requests of each kind.
    """
    num_queries, num_turns, num_unrelated = (3, 2, 2) if quick else (6, 5, 4)
    branches = texts.STORY_BRANCHES[:1] if quick else texts.STORY_BRANCHES
    num_branching = 1 + len(branches) + sum(len(leaves) for _, leaves in branches)
    rounds = 1 if quick else 3
    return [
        Workload("few_shot", "Few-shot classification", num_queries, lambda: few_shot(num_queries)),
        Workload("chat", "Chat that grows", num_turns, lambda: chat(chat_format, formatted, num_turns)),
        Workload("branching", "Branching continuations", num_branching, lambda: branching(branches)),
        Workload("unrelated", "Unrelated prompts", num_unrelated, lambda: unrelated(num_unrelated, rounds)),
    ]


def few_shot(num_queries: int) -> PromptStream:
    """One long instruction with examples, then one new message each time."""
    shots = "\n".join(f"Message: {text}\nLabel: {label}\n" for text, label in texts.TRIAGE_EXAMPLES)
    for number, query in enumerate(texts.TRIAGE_QUERIES[:num_queries], 1):
        text = f"{texts.TRIAGE_INSTRUCTION}\n{shots}\nMessage: {query}\nLabel:"
        yield Prompt(f"message {number}", text, max_new_tokens=4)


def chat(chat_format: ChatFormat, formatted: bool, num_turns: int) -> PromptStream:
    """A conversation: each prompt is everything said so far, the model's answers included."""
    messages: list[Message] = [("system", texts.CHAT_SYSTEM)]
    for number, question in enumerate(texts.CHAT_TURNS[:num_turns], 1):
        messages.append(("user", question))
        answer = yield Prompt(f"turn {number}", chat_format(messages), formatted)
        messages.append(("assistant", answer))


def branching(branches: Iterable[tuple[str, list[str]]]) -> PromptStream:
    """One start of a story, continued in several ways, each of them again in several ways."""
    limit = 16  # the story is written on by many requests
    yield Prompt("start", texts.STORY_START, max_new_tokens=limit)
    for number, (branch, leaves) in enumerate(branches, 1):
        yield Prompt(f"branch {number}", texts.STORY_START + branch, max_new_tokens=limit)
        for letter, leaf in zip("abcdefgh", leaves, strict=False):
            yield Prompt(f"branch {number}{letter}", texts.STORY_START + branch + leaf, max_new_tokens=limit)


def unrelated(num_prompts: int, rounds: int) -> PromptStream:
    """Prompts that have nothing in common: what looking for a prefix costs when there is none."""
    for label, text in texts.UNRELATED[:num_prompts]:
        yield Prompt(label, text, max_new_tokens=12, rounds=rounds)
