"""What the tools of the generated chats know about: prices, rooms, times …, and how people ask and are told.

A subject's questions and answers speak of a key {k} and a value {v}; ``need`` is how the thought calls what is wanted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from training.nano import lexicon


def _numbers(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(low, high))


def _among(words: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(words)


def _code(rng: random.Random) -> str:
    return rng.choice("ABCDEFGHKLMNPRSTUVWXZ") + str(rng.randrange(10, 1000))


def _clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def _zone(rng: random.Random) -> str:
    return rng.choice(lexicon.CITIES if rng.random() < 0.8 else lexicon.ZONES)


PEOPLE: Final = lexicon.WOMEN + lexicon.MEN


@dataclass(frozen=True, slots=True)
class Subject:
    """One kind of fact.

    Attributes:
        nouns: words for the value, from which tools and fields of results are named.
        params: words for the key.
        unit: whether values are numbers that may be added, and of what.
    """

    name: str
    need: str
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[str, ...]
    key: Callable[[random.Random], str]
    value: Callable[[random.Random], str]
    questions: tuple[str, ...]
    answer: str
    unit: str = ""


SUBJECTS: Final = (
    Subject(
        "price", "price of the {k}", ("price", "cost", "item_price"),
        ("The price of an item", "What an item costs", "Price of an article in dollars",
        "Returns the price of a product"),
        ("item", "product", "name", "article", "thing"), _among(lexicon.WARES), _numbers(2, 400),
        ("What does the {k} cost?", "How much is the {k}?", "What is the price of the {k}?",
        "Tell me the price of the {k}.",
         "I want to know what the {k} costs.", "Which price does the {k} have?"),
        "The {k} costs {v} dollars.", "dollars",
    ),
    Subject(
        "kilo price", "price of {k}", ("kilo_price", "price_per_kilo", "rate"),
        ("The price of a kilo", "What a kilo of some goods costs", "Price per kilo in dollars"),
        ("goods", "material", "product", "name"), _among(lexicon.GOODS), _numbers(2, 100),
        ("What does a kilo of {k} cost?", "How much is a kilo of {k}?", "What is the price of {k}?",
        "How dear is {k}?"),
        "A kilo of {k} costs {v} dollars.", "dollars",
    ),
    Subject(
        "stock", "stock of {k}", ("stock", "inventory", "amount", "supply"),
        ("How many of an article are in stock", "Stock of an article", "Number of pieces in the store",
        "Counts the stock"),
        ("article", "code", "item", "id", "part"), _code, _numbers(2, 900),
        ("How many {k} are in stock?", "What is the stock of {k}?", "How many pieces of {k} do we have?",
         "How much {k} is in the store?", "Check the stock of {k}."),
        "There are {v} pieces of {k}.", "pieces",
    ),
    Subject(
        "extension", "extension of {k}", ("extension", "phone", "phone_number", "number"),
        ("The phone extension of a person", "Phone number of somebody", "Extension of an employee"),
        ("person", "name", "employee", "who"), _among(PEOPLE), _numbers(100, 1000),
        ("What is {k}'s extension?", "Which extension does {k} have?", "How do I phone {k}?",
        "What is {k}'s phone number?",
         "I need the extension of {k}."),
        "{k} has extension {v}.",
    ),
    Subject(
        "room", "room of {k}", ("room", "office", "place"),
        ("The room of a person", "In which room somebody sits", "Finds the office of an employee"),
        ("person", "name", "employee", "who"), _among(PEOPLE), _numbers(1, 400),
        ("Which room is {k} in?", "Where is {k}'s office?", "What is {k}'s room number?",
        "In which room do I find {k}?"),
        "{k} is in room {v}.",
    ),
    Subject(
        "age", "age of {k}", ("age", "years", "person_age"),
        ("The age of a person", "How old somebody is", "Returns the age of a member"),
        ("person", "name", "member", "who"), _among(PEOPLE), _numbers(3, 95),
        ("How old is {k}?", "What is {k}'s age?", "Tell me how old {k} is.", "What age is {k}?"),
        "{k} is {v} years old.", "years",
    ),
    Subject(
        "weight", "weight of the {k}", ("weight", "mass", "kilos"),
        ("The weight of an item", "How heavy a thing is", "Weight of a product in kilos"),
        ("item", "product", "object", "thing"), _among(lexicon.WARES), _numbers(2, 90),
        ("How heavy is the {k}?", "What does the {k} weigh?", "What is the weight of the {k}?",
        "Tell me the weight of the {k}."),
        "The {k} weighs {v} kilos.", "kilos",
    ),
    Subject(
        "score", "score of {k}", ("score", "points", "result"),
        ("The score of a player", "How many points somebody has", "Points of a player"),
        ("player", "name", "member", "who"), _among(PEOPLE), _numbers(2, 500),
        ("How many points does {k} have?", "What is {k}'s score?", "What score does {k} have?",
        "Look up {k}'s points."),
        "{k} has {v} points.", "points",
    ),
    Subject(
        "distance", "distance to {k}", ("distance", "way", "kilometres"),
        ("The distance to a city", "How far away a city is", "Distance to a place in kilometres"),
        ("city", "place", "town", "destination"), _among(lexicon.CITIES), _numbers(20, 990),
        ("How far is it to {k}?", "What is the distance to {k}?", "How many kilometres is it to {k}?",
        "How far away is {k}?"),
        "It is {v} kilometres to {k}.", "kilometres",
    ),
    Subject(
        "time", "time in {k}", ("time", "clock", "local_time", "hour"),
        ("The time in a city", "What time it is somewhere", "Local time of a place", "Returns the current time"),
        ("city", "place", "timezone", "location", "zone"), _zone, _clock,
        ("What time is it in {k}?", "What is the time in {k}?", "How late is it in {k}?", "Tell me the time in {k}.",
         "What does the clock say in {k}?"),
        "It is {v} in {k}.",
    ),
    Subject(
        "home", "city of {k}", ("city", "home", "town", "residence"),
        ("The city where a person lives", "Where somebody lives", "Home town of a person"),
        ("person", "name", "who", "member"), _among(PEOPLE), _among(lexicon.CITIES),
        ("Where does {k} live?", "In which city does {k} live?", "What is {k}'s home town?",
        "Which city does {k} live in?"),
        "{k} lives in {v}.",
    ),
    Subject(
        "occupant", "person in room {k}", ("occupant", "person", "tenant", "user"),
        ("The person in a room", "Who sits in a room", "Finds out who works in a room"),
        ("room", "number", "room_number", "office"), _numbers(1, 400), _among(PEOPLE),
        ("Who sits in room {k}?", "Who is in room {k}?", "Which person works in room {k}?",
        "Whose office is room {k}?"),
        "{v} sits in room {k}.",
    ),
    Subject(
        "platform", "platform of train {k}", ("platform", "track", "departure"),
        ("The platform of a train", "From which platform a train leaves", "Track of a train"),
        ("train", "number", "train_number", "line"), _numbers(10, 990), _numbers(1, 30),
        ("Which platform does train {k} leave from?", "Where does train {k} leave?",
        "What is the platform of train {k}?"),
        "Train {k} leaves from platform {v}.",
    ),
    Subject(
        "status", "status of order {k}", ("status", "order_status", "state"),
        ("The status of an order", "How far an order is", "State of an order"),
        ("order", "order_id", "number", "id"), _numbers(100, 9999), _among(("open", "sent", "paid", "lost", "ready",
        "new")),
        ("What is the status of order {k}?", "How is order {k} doing?", "Is order {k} done?", "What about order {k}?"),
        "Order {k} is {v}.",
    ),
)  # fmt: skip
BY_NAME: Final = {subject.name: subject for subject in SUBJECTS}
ADDABLE: Final = tuple(subject for subject in SUBJECTS if subject.unit)
INTEGER_KEYS: Final = frozenset(("occupant", "platform", "status"))
CHAINS: Final = (
    ("occupant", "extension"),
    ("occupant", "age"),
    ("home", "time"),
    ("home", "distance"),
    ("occupant", "home"),
)
"""The first one's value is the second one's key."""

CHAINED: Final = {
    "extension": ("Which extension does the person in room {k} have?", "How do I phone whoever sits in room {k}?"),
    "age": ("How old is the person in room {k}?", "What is the age of whoever sits in room {k}?"),
    "time": ("What time is it where {k} lives?", "What is the time in {k}'s city?", "How late is it at {k}'s home?"),
    "distance": ("How far is it to where {k} lives?", "What is the distance to {k}'s city?"),
    "home": ("Where does the person in room {k} live?", "In which city does whoever sits in room {k} live?"),
}  # fmt: skip

FOREIGN: Final = (
    ("weather", "weather in {k}", "city", "The weather in a city", lexicon.CITIES,
     ("What is the weather in {k}?", "Is it raining in {k}?", "How warm is it in {k}?")),
    ("send_mail", "mail to {k}", "to", "Send a mail to a person", PEOPLE,
     ("Send a mail to {k}.", "Write {k} a mail.", "Please mail {k} my greetings.")),
    ("play_song", "song about {k}", "title", "Play a song", lexicon.THINGS,
     ("Play a song about {k}.", "I want to hear a song about {k}.")),
    ("translate", "translation of {k}", "text", "Translate a text", lexicon.WARES,
     ("Translate {k} into French.", "What is {k} in Spanish?", "How do you say {k} in German?")),
    ("book_flight", "flight to {k}", "city", "Book a flight", lexicon.CITIES,
     ("Book a flight to {k}.", "I want to fly to {k}. Book it.", "Get me a seat to {k}.")),
    ("set_alarm", "alarm at {k}", "time", "Set an alarm", tuple(f"{hour}:00" for hour in range(5, 12)),
     ("Wake me at {k}.", "Set an alarm for {k}.")),
    ("draw", "picture of {k}", "what", "Draw a picture", lexicon.THINGS,
     ("Draw a picture of {k}.", "Make me a picture with {k}.")),
)  # fmt: skip
"""What no tool of ours ever does when asked: tool, need, parameter, description, keys, questions."""
