"""What is typed on the page "The radix tree": prompts of three kinds, and what happens to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLOCK_SIZE = 4

# What happens to a request, in this order; `answer` and `keep` only if it has an answer.
ALL = ("type", "match", "allocate", "compute", "insert", "answer", "keep", "release")


@dataclass(frozen=True)
class Prompt:
    """One request.

    Attributes:
        text: Its words; a word is a token.
        pasted: How many leading words come at once, as a program sends them, before the others are typed one by one.
        answer: What the model says; the scene writes it, no model runs.
    """

    text: str
    pasted: int = 0
    answer: str = ""

    @property
    def words(self) -> list[str]:
        """The prompt, word by word."""
        return self.text.split()

    @property
    def answer_words(self) -> list[str]:
        """The answer, word by word."""
        return self.answer.split()

    def acts(self, last: str = "release") -> Iterator[str]:
        """What happens to it, up to `last`."""
        for act in ALL[: ALL.index(last) + 1]:
            if self.answer or act not in ("answer", "keep"):
                yield act


@dataclass(frozen=True)
class Example:
    """Prompts in a row.

    Attributes:
        label: Its name on the page.
        prompts: The requests.
        together: Pairs of neighbours that run at the same time: the first is released after the second.
        waits: Pairs of neighbours that are typed before either starts, so that neither finds the other's blocks.
    """

    label: str
    prompts: tuple[Prompt, ...]
    together: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()

    def acts(self) -> Iterator[tuple[str, int]]:
        """What happens, in order: the act, and the number of the prompt."""
        number = 0
        while number < len(self.prompts):
            pair = number, number + 1
            if number in self.waits:
                for act in ALL:
                    yield from ((act, n) for n in pair if act in self.prompts[n].acts())
                number += 2
            elif number in self.together:
                yield from ((act, number) for act in self.prompts[number].acts("insert"))
                yield from ((act, number + 1) for act in self.prompts[number + 1].acts())
                yield from ((act, number) for act in self.prompts[number].acts() if act in ALL[5:])
                number += 2
            else:
                yield from ((act, number) for act in self.prompts[number].acts())
                number += 1


_REVIEW = "Good or bad review ? great food = good cold soup = bad"
_FRENCH = "To French : sea = mer sun = soleil"
_CAPITAL = "Capital : Peru = Lima Oman = Muscat"
_SYSTEM = "You are a terse guide to Rome ."
_STORY = "Once a fox met a crow on a hill ."


def _chat(system: str, *turns: tuple[str, str]) -> list[Prompt]:
    """Each turn sends the whole conversation so far, and a question."""
    prompts, history = [], system
    for number, (question, answer) in enumerate(turns):
        pasted = len(history.split()) if number else 0
        prompts.append(Prompt(f"{history} {question}", pasted, answer))
        history = f"{history} {question} {answer}"
    return prompts


def _rome() -> tuple[Prompt, ...]:
    first = _chat(
        _SYSTEM,
        ("> what to see ?", "- The old Forum ."),
        ("> when is it open ?", "- From nine to six ."),
        ("> and the price ?", "- Twelve euro ."),
    )
    second = _chat(
        _SYSTEM,
        ("> where to eat ?", "- In Monti ."),
        ("> is it far ?", "- No , walk ."),
    )
    again = first[1].text.split()
    edited = " ".join(again[: len(again) - 5]) + " is it free ?"
    return (
        first[0],
        first[1],
        second[0],
        first[2],
        second[1],
        Prompt(edited, len(edited.split()) - 4, "- On Sundays ."),
        Prompt(f"{_SYSTEM} > what to see ?", len(_SYSTEM.split())),
    )


def _few_shot() -> tuple[Prompt, ...]:
    def ask(header: str, question: str, typed: bool = False) -> Prompt:
        return Prompt(f"{header} {question} =", 0 if typed else len(header.split()))

    return (
        ask(_REVIEW, "slow waiter", typed=True),
        ask(_REVIEW, "warm bread", typed=True),
        ask(_REVIEW, "slow cook"),
        ask(_FRENCH, "moon", typed=True),
        ask(_REVIEW, "warm bread"),
        ask(_FRENCH, "star"),
        ask(_CAPITAL, "Togo", typed=True),
        ask(_REVIEW, "fresh fish"),
        ask(_CAPITAL, "Mali"),
        ask(_REVIEW, "warm bread"),
        ask(_FRENCH, "moon light"),
        ask(_REVIEW, "warm bread roll"),
    )


def _branching() -> tuple[Prompt, ...]:
    stem = len(_STORY.split())
    return (
        Prompt(f"{_STORY} The crow sang"),
        Prompt(f"{_STORY} The fox ran home", stem),
        Prompt(f"{_STORY} The fox ran home and slept until noon .", stem),
        Prompt(f"{_STORY} The fox ran home and slept until dark .", stem),
        Prompt(f"{_STORY} The crow sang so the cheese fell", stem),
        Prompt(f"{_STORY} The crow sang so the fox wept .", stem),
        Prompt(f"{_STORY} The hill was cold and the crow flew off .", stem),
        Prompt(f"{_STORY} The fox ran home and slept until noon . Then it ate .", stem),
    )


EXAMPLES = {
    "few-shot": Example("Few-shot", _few_shot()),
    "chat": Example("Chat", _rome()),
    "branching": Example("Branching", _branching(), together=(4,), waits=(2,)),
}
