"""Texts of the workloads: any number of them, the same each time, put together from parts."""

from __future__ import annotations

import re

from radixkv.demo import texts as demo_texts

_PLANTS = (
    "kale",
    "leeks",
    "broad beans",
    "peas",
    "carrots",
    "lettuces",
    "tomatoes",
    "courgettes",
    "beetroots",
    "marigolds",
    "young apple trees",
)
_WORRIES = (
    "have yellow leaves at the bottom and none of the new ones grow longer than my thumb.",
    "were fine until Tuesday's rain and now lie flat on the ground, all in the same direction.",
    "are eaten at night. There are no slugs, I looked with a torch at eleven and again at two.",
    "stopped growing three weeks ago, although I water them every evening and the soil looks dark.",
    "have small white spots on the underside, and when I touch them something flies up.",
    "bolted before I could pick anything, and it is not even June.",
    "stand in a corner where the sun comes only after four. The neighbour's hedge will not get lower.",
)
_ENDINGS = (
    "What should I look at first?",
    "Is it too late to start again this year?",
    "My sister says to pull everything out. Would you?",
    "I can lend a hand on Saturdays only; what has to be done before the frost?",
    "Which of your seeds would do better in that place?",
)

_STREETS = (
    "Mill Lane",
    "Station Road",
    "Orchard Street",
    "Weaver Street",
    "Church Row",
    "Bridge Street",
    "Quay Hill",
)
_PROBLEMS = (
    "the street lamp goes on at noon and off at dusk, as if somebody had turned the clock around.",
    "water comes up between the paving stones whenever the lock is opened, and it smells of diesel.",
    "the container for glass has been full since the holidays, and bottles stand around it in rows.",
    "a neighbour is laying a roof on his shed with a nail gun, on Sundays, from seven in the morning.",
    "the slide has a crack along its whole length, just where small hands hold on to it.",
    "I would like to let a room to guests in summer. Do I need a licence, and who comes to inspect it?",
    "the kerb has been lowered on one side of the crossing only, so that wheelchairs get stuck halfway.",
    "three lime trees have been marked with a red cross. Nobody has told us what that means.",
)

#: Later turns of the chats.
FOLLOW_UPS = (
    "Thank you. I had a closer look this morning: the soil is warm on top and wet like a sponge two fingers down. "
    "Does that change anything?",
    "Good. And how often should I come back to check, and what must I see before I leave it alone?",
    "I have one bed left over, about two metres by three, in full sun. What goes well next to that?",
    "My daughter wants to help and she is six. Which part of this can she do with her own hands?",
)

#: A task with many possible first steps.
PROBLEM = """\
A village wants to run its own bus. It has one bus with twelve seats, two drivers who may each work six hours a day,
and fuel for one hundred and twenty kilometres a day. There are five places to serve: the railway station, 9 km from
the village; the school, 4 km; the clinic, 11 km, on the same road as the station but behind it; the farm at the lake,
6 km in the other direction; and the market in the next town, 14 km, of which 9 are the way to the station. The school
needs the bus at a quarter to eight and at half past one, for up to twenty children. The train to the city leaves at
seven minutes past every hour, and people will not come if they have to wait for more than a quarter of an hour. The
clinic has appointments from nine to twelve. On Fridays, market day, everybody wants to go to the market at ten and
come back at noon. Nobody may be left standing in the evening: the last train arrives at seven minutes past nine.

Find a timetable for a Friday. Think in steps. Write one thought at a time, name the fact that it rests on, and say at
the end of the thought whether it should be followed further or given up."""

#: How a thought may begin.
THOUGHTS = (
    "Start with what cannot be moved. The school",
    "Count the kilometres first. One round trip to the station takes",
    "The drivers are the narrowest part. If the first of them begins at",
    "Suppose that the farm at the lake is served only twice, then",
    "Try to combine the clinic with the station, because",
    "What if the children go in two trips? Then the bus",
    "Look at the evening before the morning. The last train",
    "Leave the market out for a moment and see whether",
)

#: Sentences of texts that have nothing to do with each other.
SENTENCES = tuple(
    sentence.strip()
    for _, text in demo_texts.UNRELATED
    for sentence in re.split(r"(?<=[.?:])\s+", text)
    if len(sentence.strip()) > 20
)

_FIRST = (
    "Amber", "Brine", "Cedar", "Delta", "Ember", "Fjord", "Grove", "Harbour", "Iris", "Juniper", "Kiln", "Lantern",
    "Meadow", "Nectar", "Orbit", "Pebble", "Quartz", "River", "Saffron", "Timber", "Umbra", "Velvet", "Willow",
    "Yarrow", "Zenith",
)  # fmt: skip


def question(number: int) -> str:
    """What customer `number`, counted from 0, asks a seed shop; no two ask the same."""
    plant, worry, ending = _pick(number, _PLANTS, _WORRIES, _ENDINGS)
    return f"In bed {number + 1} of our allotment the {plant} {worry} {ending}"


def message(number: int) -> str:
    """What resident `number`, counted from 0, writes to a town hall; no two write the same."""
    street, problem = _pick(number, _STREETS, _PROBLEMS)
    return f"In front of number {number + 1}, {street}, {problem}"


def first_words(number: int) -> str:
    """A heading that no other number has; those of neighbours differ in their first letter."""
    head, again = _FIRST[number % len(_FIRST)], number // len(_FIRST)
    return f"{head} {_FIRST[(number + again) % len(_FIRST)]}{f' {again}' if again else ''}"


def _pick(number: int, *lists: tuple[str, ...]) -> list[str]:
    """One of each list; all pairs come up, because the lengths have no common divisor."""
    return [choices[number % len(choices)] for choices in lists]
