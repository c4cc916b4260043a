"""Names and things of the stories and errands. Plain English words, chosen for this project."""

from __future__ import annotations

from typing import Final


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WOMEN: Final = words(
    "Ann Anna Amy Bella Carla Cleo Clara Dana Dora Ella Emma Eva Fay Flora Gina Greta Hanna Helen Ida Ines Iris Ivy "
    "Jana Jill Judy Kate Kim Lara Lea Lena Lily Lisa Lucy Maria Mary Mia Mona Nadia Nina Nora Olga Paula Rita Rosa "
    "Ruth Sara Sofia Tara Tina Uma Vera Wanda Yoko Zoe Aisha Leila Mei Priya Amara Ingrid Marta Elena Noor"
)
MEN: Final = words(
    "Adam Alan Alex Ali Amir Ben Boris Carl Chen Dan David Eli Emil Eric Finn Frank Fred George Hugo Ivan Jack Jan "
    "Jim Joe John Jonas Karl Ken Leo Liam Luis Luke Marco Mark Max Milo Nick Noah Omar Oscar Otto Paul Pedro Peter "
    "Ravi Rob Sam Simon Sven Theo Tim Tom Tony Umar Victor Walter Yusuf Kofi Mateo Pavel Kenji Diego Anton"
)

THINGS: Final = words(
    "apples pears plums lemons oranges cherries nuts eggs cookies rolls cakes sweets carrots potatoes onions "
    "tomatoes pens pencils crayons brushes stamps cards coins marbles beads buttons shells stones feathers stickers "
    "badges dolls kites balls books maps comics letters postcards photos candles cups plates spoons bottles jars "
    "keys nails screws bolts bricks tiles boards ribbons socks hats scarves gloves roses tulips seeds plants "
    "tickets tokens magnets puzzles games records lamps batteries bulbs towels baskets ropes bells flags"
)
COLOURS: Final = words("red blue green yellow white black brown grey pink orange purple golden silver")
QUALITIES: Final = (("big", "small"), ("old", "new"), ("plain", "painted"), ("light", "dark"), ("clean", "dirty"))
BOXES: Final = (
    ("boxes", "box"), ("bags", "bag"), ("packs", "pack"), ("trays", "tray"), ("drawers", "drawer"), ("crates", "crate"),
    ("cartons", "carton"), ("tins", "tin"), ("rows", "row"), ("sacks", "sack"), ("cases", "case"), ("chests", "chest"),
)  # fmt: skip
SHARERS: Final = words("friends children cousins pupils neighbours students guests players helpers sisters")

CROWDS: Final = (
    ("people", "on the bus"), ("people", "in the hall"), ("people", "on the train"), ("people", "at the party"),
    ("children", "in the park"), ("children", "in the pool"), ("children", "in the yard"), ("birds", "in the tree"),
    ("birds", "on the lake"), ("ducks", "on the pond"), ("cars", "in the garage"), ("boats", "in the harbour"),
    ("sheep", "in the field"), ("cows", "on the meadow"), ("students", "in the library"), ("guests", "in the hotel"),
    ("visitors", "in the museum"), ("players", "on the field"), ("bees", "on the flowers"), ("trucks", "at the depot"),
    ("passengers", "on the ship"), ("dancers", "on the stage"), ("geese", "by the river"), ("horses", "in the stable"),
)  # fmt: skip

WARES: Final = words(
    "lamp chair table shirt jacket cap belt bag clock radio phone camera drum guitar book map kettle pot pan knife "
    "fan tent rope bike helmet scooter mirror carpet vase pillow blanket sweater coat scarf ring watch toy ball "
    "puzzle game desk shelf brush hammer saw drill ladder bucket spade basket"
)
MONEY: Final = ("dollars", "dollars", "euros", "pounds", "francs", "pesos", "crowns")

LENGTHS: Final = (
    ("rope", "metres"), ("ribbon", "centimetres"), ("pipe", "metres"), ("cable", "metres"), ("plank", "centimetres"),
    ("wire", "metres"), ("fence", "metres"), ("string", "centimetres"), ("hose", "metres"), ("strip", "inches"),
    ("chain", "feet"), ("board", "inches"), ("tunnel", "metres"), ("cord", "feet"), ("rail", "metres"),
)  # fmt: skip
STOCKS: Final = (
    ("water", "litres", "tank"), ("milk", "litres", "can"), ("oil", "litres", "barrel"), ("juice", "litres", "jug"),
    ("sand", "kilos", "pile"), ("flour", "kilos", "sack"), ("rice", "kilos", "bin"), ("sugar", "grams", "jar"),
    ("coal", "kilos", "cellar"), ("soup", "litres", "pot"), ("paint", "litres", "drum"), ("salt", "grams", "bowl"),
    ("grain", "tons", "silo"), ("fuel", "gallons", "truck"), ("honey", "grams", "pot"), ("petrol", "litres", "tank"),
)  # fmt: skip

WORKS: Final = (
    ("reads/read", "read", "pages"), ("bakes/baked", "bake", "cakes"), ("plants/planted", "plant", "trees"),
    ("solves/solved", "solve", "puzzles"), ("writes/wrote", "write", "letters"), ("washes/washed", "wash", "cars"),
    ("repairs/repaired", "repair", "bikes"), ("sews/sewed", "sew", "shirts"), ("paints/painted", "paint", "doors"),
    ("picks/picked", "pick", "apples"), ("packs/packed", "pack", "boxes"), ("folds/folded", "fold", "towels"),
    ("sells/sold", "sell", "tickets"), ("makes/made", "make", "candles"), ("carries/carried", "carry", "bricks"),
    ("draws/drew", "draw", "maps"), ("cleans/cleaned", "clean", "windows"), ("learns/learned", "learn", "words"),
    ("catches/caught", "catch", "fish"), ("swims/swam", "swim", "lengths"), ("runs/ran", "run", "rounds"),
    ("types/typed", "type", "lines"), ("lays/laid", "lay", "tiles"), ("digs/dug", "dig", "holes"),
)  # fmt: skip
SPANS: Final = (("hour", "hours"), ("day", "days"), ("week", "weeks"), ("minute", "minutes"), ("month", "months"))

CITIES: Final = words(
    "Rome Paris London Berlin Madrid Lisbon Vienna Prague Oslo Cairo Delhi Tokyo Seoul Lima Quito Bogota Havana "
    "Dakar Accra Lagos Nairobi Tunis Athens Dublin Warsaw Riga Sofia Geneva Milan Naples Hanoi Manila Sydney Perth "
    "Boston Denver Dallas Austin Toronto Bergen Malmo Turin Porto Krakow Izmir Busan Osaka Kyoto"
)
ZONES: Final = words("UTC GMT CET Europe/Rome Europe/Paris Asia/Tokyo Asia/Seoul America/Lima Africa/Cairo")
GOODS: Final = words(
    "rice flour sugar coffee tea cheese honey salt butter beef fish corn wheat oats barley cocoa pepper cotton wool "
    "clay sand gravel cement copper zinc tin lead iron steel"
)
SYLLABLES: Final = words(
    "ba be bi bo bu da de di do du fa fe fi fo fu ga ge go gu ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni "
    "no nu pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi xa xi za ze zi zo zu"
)


def plural(word: str) -> str:
    """Of a regular noun.

    >>> [plural(word) for word in ("toy", "brush", "knife", "shelf", "story")]
    ['toys', 'brushes', 'knives', 'shelves', 'stories']
    """
    if word.endswith(("sh", "ch", "s", "x")):
        return word + "es"
    if word.endswith(("fe", "lf", "arf")):
        return word.rstrip("fe") + "ves"
    if word.endswith("y") and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + "s"
