"""The demo's prompts as plain text, written for it. `workloads` puts them together."""

from __future__ import annotations

TRIAGE_INSTRUCTION = """\
You sort messages that residents send to the town hall. Give each message exactly one label:
Roads (potholes, pavements, traffic lights, signs, parking), Water (leaks, pressure, drains, flooding),
Waste (bins, collections, fly-tipping, recycling), Parks (trees, playgrounds, benches, paths in green areas),
Noise (music, building work, alarms, animals), Permits (licences, applications, fees, planning, events).
If a message touches two subjects, choose the one that needs someone to act first.
"""

TRIAGE_EXAMPLES: list[tuple[str, str]] = [
    (
        "The hole in front of the bakery on Mill Lane has grown again since the frost. Two cyclists went over "
        "their handlebars this week and somebody has put a traffic cone in it.",
        "Roads",
    ),
    (
        "Brown water comes out of the kitchen tap every morning for about ten minutes. My neighbours at "
        "numbers 14 and 18 have the same thing.",
        "Water",
    ),
    (
        "Our green bin has not been emptied for three weeks. The lorry drives past, the driver waves, and that "
        "is all.",
        "Waste",
    ),
    (
        "A large branch of the chestnut by the bandstand is cracked and hangs over the path where the school "
        "children walk.",
        "Parks",
    ),
    (
        "The car wash starts its compressor at half past five, Sundays included. I can hear it with the windows "
        "closed and a pillow over my head.",
        "Noise",
    ),
    (
        "I want to put two tables outside my café from May to September. Which form do I need, and is the fee "
        "per table or per square metre?",
        "Permits",
    ),
    (
        "The lights at the junction of Station Road and the bypass stay red for the side street all day long, "
        "even when nobody is waiting on the main road.",
        "Roads",
    ),
    (
        "After the storm the drain by the underpass is blocked with leaves and the water is now up to the second "
        "step. It will be in the cellars tonight.",
        "Water",
    ),
    (
        "Somebody dumped a fridge, four tyres and what looks like half a kitchen behind the allotments. The "
        "fridge is still full.",
        "Waste",
    ),
    (
        "One chain of the swing in Victoria Gardens has worn so thin that you can bend the link with your fingers. "
        "Please take it down before the weekend.",
        "Parks",
    ),
    (
        "The alarm of the empty shop next to the chemist has been going for two nights. The number on the box is "
        "not in service.",
        "Noise",
    ),
    (
        "We would like to close Orchard Street for a summer party on the second Saturday in July. How many weeks "
        "ahead must we apply?",
        "Permits",
    ),
    (
        "The new paint on the zebra crossing outside the library was gone after one winter, and drivers no longer "
        "stop.",
        "Roads",
    ),
    (
        "There is hardly any pressure on the third floor since they worked on the main last Tuesday. The shower "
        "only drips.",
        "Water",
    ),
    (
        "Can I put pizza boxes in the paper container or not? The leaflet says yes and the sticker on the lid says "
        "no.",
        "Waste",
    ),
    (
        "The bench at the viewpoint lost its backrest and the path up there is so overgrown that my wheelchair does "
        "not get through.",
        "Parks",
    ),
    (
        "Three dogs bark in the yard behind ours from the moment the owners leave until they come back, which is "
        "nine hours.",
        "Noise",
    ),
    (
        "My application to build a carport was refused without a reason. I paid the fee in March. Whom do I write "
        "to for an appeal?",
        "Permits",
    ),
    (
        "Vans park on the pavement in Weaver Street every evening, so that people with prams have to walk on the "
        "road.",
        "Roads",
    ),
    (
        "The public fountain on the market square runs over its edge, and the overflow has turned the cobbles into "
        "an ice rink.",
        "Water",
    ),
]

TRIAGE_QUERIES: list[str] = [
    "The bass from the new bar under our flat shakes the glasses in the cupboard until three in the morning, "
    "although its sign says that it closes at midnight.",
    "Someone has thrown garden rubbish and old paint tins into the paper container at the end of Church Row.",
    "Do I need permission to take down the wall between my garden and the footpath, and what does it cost?",
    "A manhole cover on Bridge Street has sunk by a hand's width, and every car that drives over it makes a bang.",
    "There has been a puddle over the stop valve in front of number 7 for a week, and it has not rained since.",
    "The net of the football goal in the meadow is torn, and the slide next to it has a sharp edge at the bottom.",
]

CHAT_SYSTEM = """\
You are the gardening helper of a seed shop in a small town with cold winters and heavy clay soil. Customers write to
you about their vegetable beds, fruit trees and window boxes. Answer in two or three plain sentences, name the month
in which to do the work, and say what to look for before starting. Do not recommend chemical sprays; if a plant is
ill, tell the customer which leaves to remove and how to water. When you are not sure, ask one question that would
settle it. The shop sells seeds of peas, broad beans, kale, leeks, carrots, beetroot, lettuce, tomatoes, courgettes
and marigolds, and it lends tools for a day: spades, forks, a wheelbarrow and a soil thermometer. It is open from
Tuesday to Saturday. Last frost usually falls in the second week of May, first frost in the middle of October."""

CHAT_TURNS: list[str] = [
    "Good morning! I have just taken over an allotment. The soil is so heavy that the spade comes out with a brick of "
    "clay on it, and the last owner grew nothing but grass. What should I do first, and what can I still sow in "
    "April?",
    "Thank you. A neighbour says that I should dig in sand, another one says never to do that. There is also a heap "
    "of horse manure at the gate which I may use. Which of them is right?",
    "Good, I will do that. My two children would like to grow something of their own that they can eat from the plant "
    "before the summer holidays, which start on the first of July. What would you give them?",
    "One more thing: the apple tree at the end of the plot has grey, flaky bark and last year the fruit fell when it "
    "was the size of a walnut. Can it be saved, or should I plant a new one?",
    "Last question for today. I work until six and can water only in the evening, and never on Wednesdays. Will the "
    "beds survive, and which of all these plants will suffer first?",
]

STORY_START = """\
The ferry to Aldersund left twice a day in summer and once in winter, and on the last Sunday of October nobody was
quite sure which timetable applied. Ines stood at the railing with her collar up and counted the lights on the other
side of the sound. There should have been seven: two at the harbour, four along the road to the church, and the green
one on the mole that her grandfather had tended for thirty years. She counted six.

"The green one is out," she said to the mate, who was coiling a rope that did not need coiling.

"It's been out since Thursday," he said. "They sent a man. The man went home again."

She had a letter in her pocket, in handwriting that she had known before she could read. It was dated the Wednesday,
which was the day on which, according to the telephone call from the parish, her grandfather had been found in his
chair with the radio on and his boots already laced. The letter did not say goodbye, and it did not say come. It said
that the lamp needed a new glass, that the key was where it always was, and that under no circumstances was she to
let the surveyor into the cellar before she had been there herself.

Behind her, in the warm cabin, sat the only other passenger. He had a flat leather case on his knees, of the kind in
which people carry maps, and he had watched her since the mainland without once looking as if he did. When the engine
changed its note and the boat began its long turn into the harbour, he stood up, buttoned his coat, and came out to
stand beside her, a little too close, as strangers do who have made up their minds.

"""

STORY_BRANCHES: list[tuple[str, list[str]]] = [
    (
        '"You must be the granddaughter," he said. "I am sorry for your loss. I am the surveyor." He said it gently, '
        "the way one tells somebody that their house is on fire. Ines closed her hand around the letter and answered "
        "that there must be a mistake, because the surveyor was not expected before the end of the week.",
        [
            " He smiled and opened the leather case. There was no map in it. There was a pane of green glass, wrapped "
            "in newspaper, and on the paper, in pencil, in the same hand as the letter,",
            ' "That is true," said a voice behind them. The mate had put down his rope. "The surveyor came on '
            "Thursday. He stayed for one night, and in the morning we found",
        ],
    ),
    (
        "He asked whether she knew of a room for the night. Ines told him about the inn above the chandlery, and he "
        "thanked her and gave her the case to hold while he looked for his ticket. It was much too heavy for paper. "
        "Then the boat touched the pier, the ramp went down, and when she turned around he was gone.",
        [
            " She waited until the mate had made fast both lines. Nobody had left the boat; she was sure of that. So "
            "she knelt down under the lamp at the ticket booth, opened the two brass locks and saw",
            " She carried the case up the hill, past the church and the four lights, and with each step something "
            "inside it ticked a little faster. At the door of the lamp house she put it down, felt for the key and",
        ],
    ),
]

UNRELATED: list[tuple[str, str]] = [
    (
        "recipe",
        """\
Plum dumplings for four. Boil 800 grams of floury potatoes in their skins until a knife goes in without effort, peel
them while they are hot and press them through a ricer onto a board. Let the steam escape for ten minutes; wet
potatoes take up too much flour and the dumplings turn to rubber. Make a well, add one egg, a pinch of salt, thirty
grams of soft butter and about two hundred grams of flour, and work everything together quickly, only until it no
longer sticks. Roll the dough out to the thickness of a finger and cut it into squares the size of your palm. Take
the stones out of sixteen small plums without cutting them in half, and put a lump of sugar where the stone was. Fold
the dough over the plums, seal the edges with wet fingers and roll each dumpling between your hands until it is
smooth. Simmer them in lightly salted water for twelve minutes: the water should move, not boil. Meanwhile brown a
hundred grams of breadcrumbs in butter with two spoons of sugar and a little cinnamon. Lift the dumplings out with a
slotted spoon, let them drain for a moment, and then""",
    ),
    (
        "code",
        '''\
# Review of a change to the order service
#
# def apply_discount(order, code, now=datetime.now()):
#     """Return the order's total in cents after the discount `code`."""
#     discount = DISCOUNTS.get(code.upper())
#     if discount is None or discount.expires < now:
#         return order.total
#     if discount.kind == "percent":
#         return order.total - order.total * discount.amount / 100
#     elif discount.kind == "fixed":
#         return order.total - discount.amount
#
# Comments:
# 1. The default of `now` is evaluated once, when the module is imported. A process that runs for a week compares
#    every expiry date with the moment of its start. Use None and call datetime.now() in the body.
# 2. In the percent branch the result is a float, although the docstring promises cents. 15 % of 1,999 cents gives
#    1699.15. Decide on a rounding rule, write it down and test both sides of the half cent.
# 3. A fixed discount larger than the total gives a negative amount, which the payment service takes for a refund.
# 4. If `kind` is anything else, the function falls off its end and returns None; the caller then adds None to the
#    shipping costs. Raise a ValueError that names the kind.
# 5. There is no test for a code in lower case with spaces around it, which is what customers type.
#
# A corrected version of the function, with a type for each argument:
''',
    ),
    (
        "lease",
        """\
Agreement between the owner of the boathouse at Lake Road 3 and the rowing club, in plain language. The club may use
the ground floor, the slipway and the two racks on the north wall from the first of April to the thirty-first of
October, every day between six in the morning and ten at night. It pays 2,400 a year in two equal parts, on the first
of April and on the first of July. The owner keeps the roof, the doors and the electrical installation in order; the
club keeps the slipway free of weed and pays for whatever its members break, whether or not it can be found out which
member it was. Boats that do not belong to the club or to its members may stay for three nights at most. No fuel may
be kept in the house, no stove may be lit, and nobody may sleep there. If the level of the lake is so low that no boat
can be launched for more than fourteen days in a row, the rent for these days is not owed. Each side may end the
agreement by letter before the end of November, with effect from the following March; if neither does, it goes on for
another year. Should one of these rules turn out to be void, the others stay in force, and the parties will""",
    ),
    (
        "match report",
        """\
There are draws that feel like a defeat, and then there is what happened at the Quarry Ground on Saturday afternoon.
Hollin Town were three goals up after twenty-six minutes, all of them from corners, all of them headed in by centre
back Okafor, who had not scored since he was bought in the spring of last year. The visitors looked like a team that
had got off the bus at the wrong town. Their goalkeeper argued with his own defenders, their captain argued with the
referee, and their manager, a man of sixty with the patience of an angler, sat down, poured himself tea from a flask
and did not get up again until the break. Nobody knows what he said in there. He made no substitution and he changed
no position. But within a quarter of an hour it was three to two, and from then on every pass of the home side went to
the nearest man and then back to the keeper. The equaliser, when it came in the third minute of added time, was
almost an apology: a cross that nobody touched, a bounce off the far post, and a net that hardly moved. Asked about it
afterwards, the old man put the cap on his flask and said""",
    ),
    (
        "letter",
        """\
Dear Margarethe, your parcel arrived on Tuesday, and the jars have survived, all but one, which has turned my winter
socks into something that smells of quince and will keep the moths away for years. Thank you for it and for the
photographs. I had forgotten that the house once had shutters. You ask how I like it here. The work is good, the
people at the observatory are kind and say little, and on clear nights there is nothing to do between the exposures
but to drink coffee and listen to the dome creak as it follows the sky. We are measuring the same four hundred stars
that somebody measured here in 1911, with a pencil, and so far he was wrong about two of them and we about three. What
I miss is noise: trams, the market, your brother practising the same eight bars. The village shop has six kinds of
tinned fish and one newspaper, which comes a day late, so that I live a day behind you and am always surprised. In
spring I will have nine days off in a row. If the pass is open by then, I would like to""",
    ),
]
