"""Word problems: the answer is what a simulation of the story gives, and the thought rests on the text."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from tests.training.test_nano_worked import check_step
from training.nano import stories
from training.nano.numerals import spelled
from training.nano.roles import Plan
from training.nano.stories import FRAMES, PLANS, Story
from training.nano.turns import Turn

WORDS = {spelled(number): number for number in range(1000)}


def simulated(parts: tuple[str, ...], numbers: tuple[tuple[int, ...], ...]) -> int:
    """The answer by moving things about one by one, without the roles' arithmetic."""
    told = {part: x for part, x in zip(parts, numbers, strict=True) if part in ("finally",)}
    if "finally" in told:
        for start in range(2000):
            if owned(start, parts, numbers) == told["finally"][0]:
                return start
        raise AssertionError("no beginning leads to this end")
    source, x = parts[0], numbers[0]
    have = {
        "own": lambda: x[0],
        "total": lambda: len([*range(x[0]), *range(x[1])]),
        "groups": lambda: len([item for _ in range(x[0]) for item in range(x[1])]),
        "times": lambda: len([item for _ in range(x[1]) for item in range(x[0])]),
        "more": lambda: len([*range(x[0]), *range(x[1])]),
        "rise": lambda: len([*range(x[0]), *range(x[1])]),
        "fewer": lambda: len(range(x[1], x[0])),
        "fall": lambda: len(range(x[1], x[0])),
    }[source]()
    have = owned(have, parts, numbers)
    ending, y = parts[-1], numbers[-1]
    if ending == "share":
        rounds = 0
        while have >= y[0]:
            have, rounds = have - y[0], rounds + 1
        assert have == 0, "nothing is left over"
        return rounds
    if ending == "both":
        return x[0] + have
    return {"more_than": have - (y or (0,))[0], "together": have + (y or (0,))[0], "need": (y or (0,))[0] - have}.get(
        ending, have
    )


def owned(have: int, parts: tuple[str, ...], numbers: tuple[tuple[int, ...], ...]) -> int:
    """What is there after all events."""
    things = ["thing"] * have
    for part, x in zip(parts, numbers, strict=True):
        amount = x[0] if len(x) == 1 else sum(x[1] for _ in range(x[0])) if len(x) == 2 else 0
        if part in ("gain", "gain_groups"):
            things += ["thing"] * amount
        elif part in ("loss", "loss_groups"):
            if len(things) < amount:
                return -1
            del things[:amount]
    return len(things)


def read(trait_of: dict[str, str]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Parts and their numbers from what a turn says about itself."""
    parts = tuple(name.split(".")[1] for name in trait_of["template"].split("|")[:-1])
    sizes = {
        "own": 1,
        "gain": 1,
        "loss": 1,
        "share": 1,
        "more_than": 1,
        "together": 1,
        "need": 1,
        "noise": 1,
        "finally": 1,
    }
    sizes |= {"now": 0, "plain": 0, "both": 0, "some": 0, "first": 0}
    left = [int(number) for number in trait_of["operands"].split(",")]
    numbers = []
    for part in parts:
        size = sizes.get(part, 2)
        numbers.append(tuple(left[:size]))
        left = left[size:]
    assert not left
    return parts, tuple(numbers)


def check(turn: Turn) -> None:
    """One problem in all respects."""
    trait_of = dict(trait.split(":", 1) for trait in turn.traits if trait.startswith(("template", "operands")))
    parts, numbers = read(trait_of)
    answer = simulated(parts, numbers)
    assert turn.answers == (str(answer),)
    assert re.findall(r"\d+", turn.final.text)[-1] == str(answer)
    shown = sorted(found for found in map(number_in, re.findall(r"[\w-]+", turn.user)) if found)
    wanted = sorted(number for part in numbers for number in part)
    assert not Counter(wanted) - Counter(shown), "every number stands in the text"
    known: set[int] = set()
    value = 0
    for quote, lines in quoted(turn.final.thought):
        assert quote in turn.user
        if len(lines) == 1:
            value = int(lines[0])
            assert value in [number_in(word) for word in quote.split()]
        else:
            check_step(lines)
            a, b = map(int, re.split(r"[+*/-]", lines[0]))
            within = {number_in(word) for word in quote.split()}
            assert all(operand in known | within for operand in (a, b)), "operands are quoted or worked out before"
            value = int(lines[-1])
            known |= {a, b}
        known.add(value)
    assert value == answer, "the thought ends with the answer"


def number_in(word: str) -> int | None:
    """In figures or in words."""
    return int(word) if word.isdigit() else WORDS.get(word.lower())


def quoted(thought: str) -> list[tuple[str, list[str]]]:
    """Quotes and the lines behind each."""
    found: list[tuple[str, list[str]]] = []
    for line in thought.split("\n"):
        if ": " in line:
            quote, _, first = line.rpartition(": ")
            found.append((quote, [first]))
        else:
            found[-1][1].append(line)
    return found


ALL_PLANS = [plan for by_domain in PLANS.values() for plans in by_domain.values() for plan in plans]


def test_a_simulation_of_every_plan_gives_its_answer() -> None:
    rng = random.Random(1)
    for plan in ALL_PLANS:
        story: Story = stories.numbered(rng, plan, out=False)
        assert simulated(plan.parts, story.numbers) == story.value, plan


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(("out", "unseen"), [(False, False), (True, False), (True, True)])
def test_thoughts_rest_on_the_text_and_end_in_the_answer(steps: int, out: bool, unseen: bool) -> None:
    rng = random.Random(f"{steps}{out}{unseen}")
    for _ in range(400):
        turn = stories.turn(rng, steps, out, unseen)
        check(turn)
        worked = [lines for _, lines in quoted(turn.final.thought) if len(lines) > 1]
        assert len(worked) == steps


def test_every_frame_has_the_quotes_that_its_part_needs() -> None:
    for plan in ALL_PLANS:
        story = stories.numbered(random.Random(2), plan, out=False)
        for part, quote, _ in story.lines:
            for frame in FRAMES[plan.domain, plan.parts[part]]:
                assert quote < len(frame.order), (frame.name, quote)


def test_no_placeholder_bracket_or_alternative_is_left() -> None:
    rng = random.Random(3)
    for steps in (1, 2, 3):
        for _ in range(500):
            turn = stories.turn(rng, steps, False, False)
            assert not re.search(r"[\[\]{}/]|\b[Aa] [aeiou]|  |\b1 \w+s\b", turn.user), turn.user
            assert all(
                sentence[0].isupper() or sentence[0].isdigit() for sentence in re.split(r"(?<=[.?]) ", turn.user)
            )


def test_there_are_thousands_of_templates_for_every_number_of_steps() -> None:
    for by_domain in PLANS.values():
        count = 0
        for domain, plans in by_domain.items():
            for plan in plans:
                ways = 2
                for part in plan.parts:
                    ways *= len(FRAMES[domain, part])
                count += ways
        assert count > 10_000


def test_filler_leaves_the_problem_as_it_is() -> None:
    turn = stories.turn(random.Random(4), 2, False, False, lambda: ("Nothing happened here.",))
    assert turn.user.count("Nothing happened here.") >= 2
    check(turn)


def test_a_plan_counts_its_operations() -> None:
    assert Plan("things", ("groups", "loss_groups", "now")).steps == 3
    assert Plan("things", ("some", "gain", "loss", "finally", "first")).steps == 2
