"""The five workloads: rounds of prompts that share much, little or nothing.

A workload is a generator. It yields one round of prompts at a time and is sent their answers, because the next turn
of a chat and the next level of a tree of thoughts contain what was answered before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from radixkv.bench import texts
from radixkv.demo import texts as demo_texts
from radixkv.demo.workloads import ChatFormat, Message

#: Names of the workloads, in the order in which they run.
NAMES = ("system", "few_shot", "chat", "tree", "none")


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        label: A few words to find it by.
        text: The prompt.
        formatted: The text already holds the special tokens that start a prompt.
    """

    label: str
    text: str
    formatted: bool = False


Rounds = Generator[list[Prompt], list[str], None]


@dataclass(frozen=True)
class Workload:
    """A named source of rounds of prompts.

    Attributes:
        name: Short and stable: the key in the JSON document and the word for `--workload`.
        title: For people.
        num_rounds: How many rounds it has.
        num_requests: How many prompts all rounds have together.
        start: Makes the rounds, from the first one on.
    """

    name: str
    title: str
    num_rounds: int
    num_requests: int
    start: Callable[[], Rounds] = field(repr=False)


def make_workloads(
    chat_format: ChatFormat,
    *,
    formatted: bool,
    names: Sequence[str] = NAMES,
    num_requests: int = 8,
    short: bool = False,
    quick: bool = False,
) -> list[Workload]:
    """The workloads of these names, in the order of `NAMES`.

    Args:
        chat_format: Puts a chat into text.
        formatted: `chat_format` writes the special tokens that start a prompt.
        names: Which of them.
        num_requests: Prompts of the largest round of each workload.
        short: Cut the shared texts to about a quarter: for models that take a byte for a token.
        quick: Fewer rounds.
    """
    talk = _Talk(chat_format, formatted, _shorten(demo_texts.CHAT_SYSTEM, short))
    num_turns = 2 if quick else 3
    levels = _levels(num_requests)[-2:] if quick else _levels(num_requests)
    made = {
        "system": Workload(
            "system", "Shared system prompt", 1, num_requests, lambda: system_prompt(talk, num_requests)
        ),
        "few_shot": Workload(
            "few_shot", "Few-shot classification", 1, num_requests, lambda: few_shot(num_requests, short)
        ),
        "chat": Workload(
            "chat",
            "Multi-turn chat",
            num_turns,
            num_turns * num_requests,
            lambda: chat(talk, num_requests, num_turns),
        ),
        "tree": Workload(
            "tree", "Tree of thoughts", len(levels), sum(levels), lambda: tree_of_thoughts(levels, short)
        ),
        "none": Workload("none", "Nothing shared", 1, num_requests, lambda: unrelated(num_requests, short)),
    }
    return [made[name] for name in NAMES if name in names]


def _shorten(text: str, short: bool) -> str:
    """The first sentences of a text, about a quarter of it."""
    if not short:
        return text
    end = text.find(". ", len(text) // 5)
    return text if end < 0 else text[: end + 1]


@dataclass(frozen=True)
class _Talk:
    chat_format: ChatFormat
    formatted: bool
    system: str

    def prompt(self, label: str, messages: list[Message]) -> Prompt:
        return Prompt(label, self.chat_format(messages), self.formatted)


def system_prompt(talk: _Talk, num_requests: int) -> Rounds:
    """Many customers, one instruction."""
    yield [
        talk.prompt(f"question {i + 1}", [("system", talk.system), ("user", texts.question(i))])
        for i in range(num_requests)
    ]


def few_shot(num_requests: int, short: bool) -> Rounds:
    """One instruction with examples, then a message each."""
    examples = demo_texts.TRIAGE_EXAMPLES[: 4 if short else None]
    shots = "\n".join(f"Message: {text}\nLabel: {label}\n" for text, label in examples)
    start = f"{_shorten(demo_texts.TRIAGE_INSTRUCTION, short)}\n{shots}\nMessage: "
    yield [Prompt(f"message {i + 1}", f"{start}{texts.message(i)}\nLabel:") for i in range(num_requests)]


def chat(talk: _Talk, num_chats: int, num_turns: int) -> Rounds:
    """Chats side by side, one turn of each in a round: each prompt is all that was said so far in its chat."""
    chats: list[list[Message]] = [[("system", talk.system)] for _ in range(num_chats)]
    for turn in range(num_turns):
        for i, messages in enumerate(chats):
            words = texts.question(i) if turn == 0 else texts.FOLLOW_UPS[(i + turn) % len(texts.FOLLOW_UPS)]
            messages.append(("user", words))
        answers = yield [
            talk.prompt(f"chat {i + 1}, turn {turn + 1}", messages) for i, messages in enumerate(chats)
        ]
        for messages, answer in zip(chats, answers, strict=True):
            messages.append(("assistant", answer))


def tree_of_thoughts(levels: Sequence[int], short: bool) -> Rounds:
    """One problem; each thought is written on in several ways, and each of those again."""
    paths = [(_shorten(texts.PROBLEM, short), "")]
    for depth, width in enumerate(levels):
        children = []
        for i in range(width):
            text, name = paths[i % len(paths)]
            way = i // len(paths)
            opening = texts.THOUGHTS[(way + depth) % len(texts.THOUGHTS)]
            number = f"{name}.{way + 1}".lstrip(".")
            children.append((f"{text}\n\nThought {number}: {opening}", number))
        answers = yield [Prompt(f"thought {number}", text) for text, number in children]
        paths = [
            (f"{text}{answer}", number) for (text, number), answer in zip(children, answers, strict=True)
        ]


def _levels(num_requests: int) -> list[int]:
    """How many thoughts each level has; the last has `num_requests`."""
    if num_requests < 3:
        return [num_requests]
    step = max(2, round(num_requests ** (1 / 3)))
    first = math.ceil(num_requests / step**2)
    return sorted({max(first, 2), max(num_requests // step, 2), num_requests})


def unrelated(num_requests: int, short: bool) -> Rounds:
    """Prompts of different lengths that start differently: nothing to find, and padding to pay for."""
    sentences = texts.SENTENCES
    prompts = []
    for i in range(num_requests):
        chosen = random.Random(i)
        length = chosen.randint(*((2, 6) if short else (6, 18)))
        # The first word decides: sentences may come again later on, where nobody can share them any more.
        body = " ".join(chosen.choice(sentences) for _ in range(length))
        prompts.append(Prompt(f"prompt {i + 1}", f"{texts.first_words(i)}: {body}"))
    yield prompts
