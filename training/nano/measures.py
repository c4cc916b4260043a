"""Sentences of word problems about money, measures and work; see ``frames`` for the notation.

{x} {y} are wares, {u} a unit of money or measure, {o} an object that is measured, {does} {do} a work in its forms.
"""

from __future__ import annotations

from typing import Final

SHOP: Final[dict[str, tuple[str, ...]]] = {
    "own": (
        "{H} buys/bought a {x} [for {n} {u}].",
        "a {x} [costs/cost {n} {u}]. {H} buys/bought one.",
        "{H} [pays/paid {n} {u}] for a {x}.",
        "{H} [spends/spent {n} {u}] on a {x}.",
        "the price of a {x} [is/was {n} {u}]. {H} takes/took it.",
    ),
    "total": (
        "{H} buys/bought a {x} [for {n} {u}] and a {y} [for {m} {u}].",
        "a {x} [costs/cost {n} {u}] and a {y} [costs/cost {m} {u}]. {H} buys/bought both.",
        "{H} [spends/spent {n} {u}] on a {x} and [{m} {u} on a {y}].",
        "{H} takes/took a {x}, which [costs/cost {n} {u}], and a {y}, which [costs/cost {m} {u}].",
    ),
    "groups": (
        "{H} buys/bought [{n} {t}] for [{m} {u} each].",
        "one of the {t} costs/cost [{m} {u}]. {H} buys/bought [{n} of them].",
        "{H} takes/took [{n} {t}]. [Each costs/cost {m}] {u}.",
        "{H} orders/ordered [{n} {t}] at [{m} {u} apiece].",
        "the price of the {t} is/was [{m} {u} each]. {H} wants/wanted [{n} of them].",
    ),
    "more": (
        "a {y} [costs/cost {n} {u}]. A {x} [costs/cost {m} {u} more], and {H} buys/bought the {x}.",
        "{H} buys/bought a {x}. It [costs/cost {m} {u} more] than a {y}, which [costs/cost {n}].",
    ),
    "fewer": (
        "a {y} [costs/cost {n} {u}]. A {x} [costs/cost {m} {u} less], and {H} buys/bought the {x}.",
        "{H} buys/bought a {x}. It [costs/cost {m} {u} less] than a {y}, which [costs/cost {n}].",
    ),
    "gain": (
        "{S} also buys/bought a {y} [for {n} {u}].",
        "{S} [adds/added {n} {u}] for the delivery.",
        "wrapping [costs/cost {n} {u} more].",
        "{S} [spends/spent {n} {u}] on lunch too.",
        "there is/was a [tax of {n} {u}] to pay.",
        "a {y} for {G} [costs/cost another {n}] {u}.",
    ),
    "loss": (
        "a coupon takes/took [{n} {u} off].",
        "{S} gets/got [{n} {u} off] the price.",
        "the shop takes/took [{n} {u} off].",
        "[{G} pays/paid {n} {u}] of that.",
        "the price [falls/fell by {n}] {u}.",
        "{S} [gets/got {n} {u} back].",
    ),
    "share": (
        "[{n} {kids} share/shared] the cost equally. How much does/did each of them pay?",
        "the cost is/was split equally [among {n} {kids}]. How many {u} does/did each of them pay?",
        "{H} pays/paid in [{n} equal parts]. How many {u} is/was each part?",
    ),
    "need": (
        "{S} [pays/paid with {n}] {u}. How much [change] does/did {H} get?",
        "{S} [has/had {n} {u}] with {P_}. How many {u} are/were [left]?",
        "{S} [gives/gave the seller {n}] {u}. How many {u} does/did {H} [get back]?",
    ),
    "more_than": (
        "{G} [spends/spent {n}] {u}. How many [more] {u} does/did {H} spend?",
        "{S} [has/had only {n}] {u}. How many {u} are/were [missing]?",
    ),
    "together": ("{G} [spends/spent {n}] {u}. How many {u} do/did they spend [together]?",),
    "now": (
        "how much does/did {H} pay?",
        "how many {u} does/did {H} pay in the end?",
        "how many {u} does/did {H} spend in all?",
        "what does/did {H} pay?",
    ),
    "plain": ("how much does/did {H} pay?", "how many {u} does/did {H} spend?", "what does/did that cost?"),
    "noise": (
        "the shop opens/opened at {n}.",
        "{H} is/was {n} years old.",
        "{H} walks/walked {n} minutes to the shop.",
        "there are/were {n} people in the shop.",
    ),
}

LENGTH: Final[dict[str, tuple[str, ...]]] = {
    "own": (
        "a {o} [is/was {n} {u}] long.",
        "{H} [has/had {n} {u}] of {o}.",
        "{H} needs/needed a {o} and [buys/bought {n} {u}].",
        "the length of a {o} [is/was {n} {u}].",
    ),
    "total": (
        "{H} joins/joined a {o} [of {n} {u}] and one [of {m} {u}].",
        "one part of a {o} [is/was {n} {u}] long and the other part [is/was {m} {u}] long.",
    ),
    "groups": (
        "a {o} is/was made of [{n} parts]. [Each is/was {m}] {u} long.",
        "{H} joins/joined [{n} pieces] of {o} of [{m} {u} each].",
    ),
    "gain": (
        "a piece of [{n} {u} is/was added].",
        "{S} makes/made it [{n} {u} longer].",
        "[another {n} {u} are/were joined] to it.",
        "it [grows/grew by {n}] {u}.",
    ),
    "loss": (
        "a piece of [{n} {u} is/was cut off].",
        "{S} makes/made it [{n} {u} shorter].",
        "[{n} {u} are/were taken] away.",
        "{H} [cuts/cut off {n}] {u}.",
        "[{n} {u} break/broke] off.",
    ),
    "loss_groups": ("{H} [cuts/cut off] [{n} pieces] of [{m} {u} each].",),
    "share": (
        "it is/was cut into [{n} equal pieces]. How many {u} long is/was each piece?",
        "it is/was cut into pieces, [each {n}] {u} long. How many pieces are/were there?",
    ),
    "need": (
        "{H} [needs/needed {n}] {u}. How many {u} are/were [missing]?",
        "it should [be/have been {n}] {u} long. How many {u} are/were [missing]?",
    ),
    "more_than": ("another {o} [is/was {n}] {u} long. How many {u} is/was the first one [longer]?",),
    "now": (
        "how long is/was it now/then?",
        "how many {u} long is/was it in the end?",
        "how many {u} does/did it measure then?",
    ),
    "plain": ("how long is/was it in all?", "how many {u} is/was that?"),
    "noise": ("it is/was {n} years old.", "the work takes/took {n} minutes.", "it cost {n} dollars."),
}

STOCK: Final[dict[str, tuple[str, ...]]] = {
    "own": (
        "[there are/were {n} {u}] of {x} in a {o}.",
        "a {o} [holds/held {n} {u}] of {x}.",
        "{H} [has/had {n} {u}] of {x} in a {o}.",
        "{H} [puts/put {n} {u}] of {x} into a {o}.",
    ),
    "groups": (
        "{H} pours/poured [{n} cans] of {x} into a {o}. [Each holds/held {m}] {u}.",
        "every {w} [{m} {u}] of {x} come/came into a {o}. That goes/went on [for {n} {ws}].",
    ),
    "total": ("in one {o} [are/were {n} {u}] of {x} and in another [are/were {m}] {u}.",),
    "gain": (
        "[{n} {u} are/were added].",
        "{S} [adds/added {n}] {u}.",
        "[another {n} {u} come/came] in.",
        "{S} [fills/filled in {n}] {u} more.",
    ),
    "loss": (
        "[{n} {u} are/were used].",
        "{S} [takes/took out {n}] {u}.",
        "[{n} {u} are/were lost].",
        "{S} [sells/sold {n}] {u} of it.",
        "{S} [gives/gave {n} {u}] to {G}.",
    ),
    "loss_groups": (
        "every {w} [{m} {u}] are/were [used]. That goes/went on [for {n} {ws}].",
        "{S} [fills/filled] [{n} bottles] with [{m} {u} each].",
    ),
    "share": (
        "all of it is/was put into [{n} equal parts]. How many {u} are/were in each part?",
        "[{n} {kids} share/shared] it equally. How many {u} does/did each of them get?",
    ),
    "need": (
        "there is/was room [for {n}] {u}. How many {u} would still [fit]?",
        "{H} [needs/needed {n}] {u}. How many {u} are/were [missing]?",
    ),
    "now": (
        "how many {u} are/were there now/then?",
        "how many {u} of {x} are/were left?",
        "how many {u} of {x} are/were there in the end?",
    ),
    "plain": ("how many {u} are/were there?", "how many {u} of {x} is/was that in all?"),
    "noise": ("the {o} is/was {n} years old.", "it is/was {n} degrees outside."),
}

WORK: Final[dict[str, tuple[str, ...]]] = {
    "own": (
        "on Monday {H} [{does} {n}] {t}.",
        "{H} [{does} {n}] {t} in the morning.",
        "first {H} [{does} {n}] {t}.",
        "{H} [{does} {n}] {t} in the first {w}.",
    ),
    "total": (
        "{H} [{does} {n}] {t} in the morning and [{m} in the evening].",
        "on Monday {H} [{does} {n}] {t}, and [{m} on Tuesday].",
    ),
    "groups": (
        "{H} [{does} {m}] {t} every {w}, [for {n} {ws}].",
        "in one {w} {H} [{does} {m}] {t}. {H} works/worked [for {n} {ws}].",
        "for [{n} {ws}] {H} [{does} {m} {t}] each {w}.",
        "{H} [{does} {m}] {t} per {w} and keeps/kept on [for {n} {ws}].",
    ),
    "more": ("{G} [{does} {n}] {t}. {H} {does} [{m} more than {G}].",),
    "fewer": ("{G} [{does} {n}] {t}. {H} {does} [{m} fewer than {G}].",),
    "rise": (
        "on Monday {H} [{does} {n}] {t} and on Tuesday [{m} more].",
        "{H} [{does} {n}] {t} in the morning and [{m} more than that] in the evening.",
    ),
    "fall": (
        "on Monday {H} [{does} {n}] {t} and on Tuesday [{m} fewer].",
        "{H} [{does} {n}] {t} in the morning and [{m} fewer than that] in the evening.",
    ),
    "times": ("{G} [{does} {n}] {t}. {H} {does} [{m} times as many].",),
    "gain": (
        "{S} [{does} {n} more] in the evening.",
        "{S} [{does} another {n}] after lunch.",
        "with {G}'s help {S} [{does} {n} more].",
        "the next day {S} [{does} {n} more] {t}.",
    ),
    "loss": ("[{n} of them do/did not count].", "[{n} of the {t} turn/turned out] badly and are/were not counted."),
    "more_than": ("{G} [{does} {n}]. How many [more] does/did {H} {do}?",),
    "together": (
        "{G} [{does} {n}] {t}. How many {t} do/did they {do} [together]?",
        "{G} [{does} {n}]. What is/was the [total] of the two?",
    ),
    "need": (
        "{S} [wants/wanted to {do} {n}]. How many are/were still [missing]?",
        "{P} [goal is/was {n}]. How many are/were still to [come]?",
    ),
    "both": ("how many {t} is/was that [together]?", "how many {t} are/were there [in all]?"),
    "now": (
        "how many {t} is/was that in all?",
        "how many {t} does/did {H} {do} in all?",
        "what is/was the number of {t} in the end?",
    ),
    "plain": ("how many {t} does/did {H} {do}?", "how many {t} is/was that?"),
    "noise": ("{H} is/was {n} years old.", "{H} gets/got up at {n}.", "{H} earns/earned {n} dollars."),
}
