"""The six requests of "Blocks, block tables and preemption". A word is a token here."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_SIZE = 4
SLAB = 64  # tokens that an allocator of contiguous memory would set aside for each request
HOST_BLOCKS = 14  # of the host tier, where preemption is by swap
DEFAULT_POOL = 28


class Asked(NamedTuple):
    """A request: the step in which it arrives, its prompt, and what the model will answer."""

    arrives: int
    prompt: tuple[str, ...]
    answer: tuple[str, ...]

    @property
    def text(self) -> tuple[str, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer


def _asked(arrives: int, prompt: str, answer: str) -> Asked:
    return Asked(arrives, tuple(prompt.split()), tuple(answer.split()))


_SKY = "You are a helpful assistant . Why is the sky blue ? Answer briefly ."
_RIVERS = "Name three rivers that cross Europe ."
_THREE = "The Rhine , the Danube and the Volga are three rivers of Europe ."

# Request 2 asks what request 0 asks, while that runs. Request 5 goes on where request 1 has ended.
REQUESTS = (
    _asked(1, _SKY, "Air scatters short blue waves of sunlight much more than long red ones , so it glows ."),
    _asked(2, _RIVERS, _THREE),
    _asked(
        5,
        _SKY,
        "Sunlight holds all colours . Molecules of air send the short waves , blue and violet , in every "
        "direction , and our eyes see blue best .",
    ),
    _asked(
        8,
        "Write a poem about winter .",
        "Snow lies on the sleeping hill , the river stops , the mill is still , and one small lamp burns on "
        "until the morning .",
    ),
    _asked(
        11,
        "How do I boil eggs ?",
        "Put them into boiling water , wait seven minutes , then cool them in cold water and peel them .",
    ),
    _asked(
        19,
        f"{_RIVERS} {_THREE} Which of them is longest ?",
        "The Volga : it flows about 3,500 kilometres , from the hills north-west of Moscow to the Caspian "
        "Sea .",
    ),
)

WORDS = sorted({word for asked in REQUESTS for word in asked.text})
_TOKEN = {word: token for token, word in enumerate(WORDS)}


def tokens_of(words: tuple[str, ...]) -> list[int]:
    """Token ids."""
    return [_TOKEN[word] for word in words]
