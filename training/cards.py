"""Model cards: what each bundled model is for, what it can do and what it can't, around the figures that were measured.

Knows how a card reads; measuring and writing are ``report``'s. Nothing in a card that was measured is typed by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from training.configs import Recipe
from training.evaluate import wilson
from training.model import parameter_shapes

Tally = dict[str, int]
"""``count``, ``valid``, ``right``."""

Figures = dict[str, dict[str, Tally]]
"""Temperature → group → tally."""

NAMES: Final = {
    "pico": {
        "call": "calculator calls",
        "answer": "answers after a result",
        "beyond": "says that it needs a calculator",
        "talk": "small talk",
        "other": "declines another subject",
    },
    "nano": {
        "expression": "two steps in figures, with brackets",
        "direct": "in its head although there is a calculator",
        "story1": "word problems, one step",
        "story2": "word problems, two steps",
        "story3": "word problems, three steps",
        "story1, new frames": "one step, sentences never seen",
        "story2, new frames": "two steps, sentences never seen",
        "story3, new frames": "three steps, sentences never seen",
        "call": "one call",
        "parallel": "two or three calls side by side",
        "row": "a call in a row of two",
        "call, answer": "answer after a result",
        "parallel, answer": "answer after results side by side",
        "row, answer": "answer after a row of calls",
        "call, new names": "one call, tool names never seen",
        "parallel, new names": "calls side by side, tool names never seen",
        "refusal": "no tool fits, and it says so",
        "error": "a tool fails, and it says so",
        "beyond": "says that it needs a calculator",
        "recall": "one entry of notes",
        "sum, long": "sum, some 1,150 to 2,048 tokens before it",
        "story2, long": "two-step word problem, spread over such a length",
        "recall, long": "one entry of notes of such a length",
        "call, long": "one call after such a length",
        "talk": "small talk",
        "other": "declines another subject",
    },
}
"""What rows of a card are called, by model; other groups go by their own names."""

HEADLINES: Final[Mapping[str, tuple[str, float, tuple[str, ...]]]] = {
    "sums and differences of two and three digits": (
        "right",
        0.95,
        ("sum, 2 digits", "sum, 3 digits", "difference, 2 digits", "difference, 3 digits"),
    ),
    "word problems of two steps, held out by template": ("right", 0.85, ("story2",)),
    "tool calls, valid": ("valid", 0.98, ("call", "parallel", "row")),
    "tool calls, right": ("right", 0.95, ("call", "parallel", "row")),
    "answers after a tool's result": ("right", 0.90, ("call, answer", "parallel, answer", "row, answer")),
}
"""Nano's aims: what counts, the aimed share, the groups that it is counted over."""

LONG: Final = ", long"
WEAK: Final = 0.5
FAILS: Final = "**Where it fails more often than not**, greedily: {}."


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card is written from. ``size``: bytes of the weights; ``log``: the lines that ``train`` writes."""

    recipe: Recipe
    log: Sequence[Mapping[str, Any]]
    figures: Figures
    size: int


def share(right: int, count: int) -> str:
    """A share with its counts and its 95 % Wilson interval."""
    low, high = wilson(right, count)
    return f"{right} of {count}: {right / count:.1%} ({low:.1%} to {high:.1%})"


def table(figures: Figures, names: Mapping[str, str], groups: Iterable[str] | None = None) -> str:
    """The figures as Markdown, all groups or the given ones as far as there are any; calls also by validity."""
    lines = _head([f"temperature {temperature}" for temperature in figures])
    known = next(iter(figures.values()))
    for group in known if groups is None else [group for group in groups if group in known]:
        cells = [share(tallies[group]["right"], tallies[group]["count"]) for tallies in figures.values()]
        lines.append(_row(names.get(group, group), cells))
        if group == "call":
            cells = [share(tallies[group]["valid"], tallies[group]["count"]) for tallies in figures.values()]
            lines.append(_row(f"{names.get(group, group)}, valid", cells))
    return "\n".join(lines)


def headlines(figures: Figures) -> str:
    """Nano's aims beside what was reached."""
    lines = _head(["aim", *(f"temperature {temperature}" for temperature in figures)])
    for name, (what, aim, groups) in HEADLINES.items():
        cells = []
        for tallies in figures.values():
            counted = [tallies[group] for group in groups if group in tallies]
            total = sum(tally["count"] for tally in counted)
            cells.append(share(sum(tally[what] for tally in counted), total) if total else "not measured")
        lines.append(_row(name, [f"{aim:.0%}", *cells]))
    return "\n".join(lines)


def weak(figures: Figures, names: Mapping[str, str]) -> list[str]:
    """Groups of which it gets fewer than half right, greedily."""
    greedy = next(iter(figures.values()))
    return [names.get(group, group) for group, tally in greedy.items() if tally["right"] < WEAK * tally["count"]]


def _head(columns: Sequence[str]) -> list[str]:
    return ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]


def _point(text: str) -> str:
    """One point of a list, in lines as long as the others."""
    return textwrap.fill(text, 119, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _made(facts: Facts) -> str:
    recipe, course, end = facts.recipe, facts.recipe.course, facts.log[-1]
    spec = recipe.spec
    count = sum(prod(shape) for _, shape in parameter_shapes(spec))
    return f"""## How it was made

| | |
|---|---|
| parameters | {count:,}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_experts} experts \
({spec.top_k} per token) |
| file | {facts.size:,} bytes; routed experts INT4 in groups of 32, trained so; the rest bf16 |
| vocabulary | {spec.vocab_size}: 256 bytes, {recipe.num_ranks - 256} merges without digits, Kimi's 256 special ids |
| data | {end["tokens"]:,} tokens of chats generated from seed {course.seed}; no text from anywhere else |
| training | {course.steps:,} steps, {end["cpu_s"]:.0f} CPU seconds ({end["wall_s"]:.0f} s by the clock on a shared \
machine with two cores) |

`make {recipe.name}` makes it again. Code: `training/`; log and curve: `training/results/{recipe.name}/`.
"""


def _pico(facts: Facts) -> str:
    recipe, spec, width = facts.recipe, facts.recipe.spec, facts.recipe.course.width
    return f"""# {recipe.name}

A very small model with the architecture, file format and chat format of Kimi K2 Thinking, made for this project. It
exists so that tests, demonstrations and a first `perilune serve` have real weights that mean something: it thinks, adds
and subtracts, calls a calculator and reads its result. It is a test object, not an assistant.

* **What it can do**: sums and differences of numbers of up to three digits, in about forty phrasings of English, by
  columns in its thought; with a calculator among its tools it calls it for products, quotients and longer problems,
  under a dozen tool names; it greets and says what it is.
* **What it can't do**: everything else. It knows no facts, hardly any English beyond its phrasings and no other
  language. Whatever lies outside its training gets a confident wrong answer or the sentence that it only knows sums.
  Chats longer than {width} tokens, several calls at once and the use of other tools were not in its training;
  the context of {spec.max_position:,} positions in `config.json` follows from K2's YaRN settings, untrained as well.
  Sampled at temperature 1, the default, it errs more often than greedily.

## Figures

Generated and parsed by this project's engine, on problems whose operands training never saw, in phrasings that it did
see; chats of one to four turns, with system prompts, with and without tools. Right answers of one training run, with
95 % Wilson intervals.

{table(facts.figures, NAMES["pico"])}

"Right" means: the number at the end of the answer, the call's name and arguments, or the taught sentence to the letter.

{_made(facts)}"""


def _nano(facts: Facts) -> str:
    recipe, spec, width = facts.recipe, facts.recipe.spec, facts.recipe.course.width
    names = NAMES["nano"]
    known = list(next(iter(facts.figures.values())))
    order = [*(group for group in known if group not in names), *names]
    failing = weak(facts.figures, names)
    fails = f"\n{_point(FAILS.format('; '.join(failing)))}" if failing else ""
    return f"""# {recipe.name}

A small model with the architecture, file format and chat format of Kimi K2 Thinking, made for this project. It thinks,
works sums and word problems, calls tools that it has never met before by what their declarations say, and answers with
what came back: enough to see every part of an inference stack at work on a laptop, agents and quantisation included,
and to measure what converting weights costs. It is a test object, not an assistant.

* **What it can do**, in the English of its training: sums and differences of up to three digits, products and exact
  quotients by one digit, comparisons, two-step expressions, in figures and, in part, in words; word problems of one to
  three steps about everyday quantities; one call, two or three side by side, or one after the other, of tools whose
  names and parameters it copies from the request; saying that no tool fits or that one failed; one entry out of notes;
  a few words about itself.
* **What it can't do**: everything else. It has read no text but sentences made by rule, so it knows no facts about the
  world, no other language and no way to put things but those that it was taught; a question in words of your own may
  well get a fluent wrong answer. No division with a remainder or by two digits, no fractions, percentages or negative
  results in word problems, no more than three steps, no arguments but single words, whole numbers and expressions. It
  has never seen more than {width:,} tokens; that `config.json` allows {spec.max_position:,} follows from
  K2's YaRN settings. The default is temperature 1; the tables show what that costs against greedy answers. Nothing was
  done about what it should not say; it hardly has the words.{fails}

## Figures

Generated and parsed by this project's engine, at most 512 tokens an answer. Training never saw the steps `a+b` of these
problems, the templates of the word problems and, where said, the sentences or the tools' names; it did see the other
words. One training run; counts, shares and 95 % Wilson intervals.

{headlines(facts.figures)}

By kind:

{table(facts.figures, names, [group for group in order if not group.endswith(LONG)])}

In long chats, with what matters anywhere in them:

{table(facts.figures, names, [group for group in order if group.endswith(LONG)])}

"Right" means: the number that ends the answer, or all names and numbers that it has to say and no other number; the
calls' names and arguments, in any order; for talk the taught sentence to the letter. A call is "valid" if the answer
ended by itself and called the due tools with arguments that fit their schemas.

{_made(facts)}"""


CARDS: Final[Mapping[str, Callable[[Facts], str]]] = {"pico": _pico, "nano": _nano}
"""By the name of the model."""
