"""Measures an exported model and writes what is known about it: ``python -m training.report --config pico``.

Figures (JSON) and the curve go to ``training/results/{name}/``, the model card into the model's folder. Nothing in a
card that was measured is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from training.configs import RECIPES, Recipe
from training.evaluate import wilson
from training.judge import Verdict
from training.measure import EXAMS, Exam, measure, open_engine
from training.model import parameter_shapes
from training.plot import write_curve
from training.train import ASSETS, ROOT

TEMPERATURES: Final = (0.0, 1.0)

NAMES: Final = {
    "call": "calculator calls",
    "answer": "answers after a result",
    "beyond": "says that it needs a calculator",
    "talk": "small talk",
    "other": "declines another subject",
}

Figures = dict[str, dict[str, dict[str, int]]]
"""Temperature → group → ``count``, ``valid``, ``right``."""


def figures(folder: Path, exam: Exam, count: int) -> Figures:
    """``count`` held-out chats of every kind at each temperature."""
    engine = open_engine(folder, exam)
    found: Figures = {}
    for temperature in TEMPERATURES:
        groups: dict[str, list[Verdict]] = defaultdict(list)
        for name, verdict in measure(engine, exam, count, temperature):
            groups[name].append(verdict)
        found[f"{temperature:g}"] = {
            name: {
                "count": len(verdicts),
                "valid": sum(verdict.valid for verdict in verdicts),
                "right": sum(verdict.right for verdict in verdicts),
            }
            for name, verdicts in sorted(groups.items())
        }
    return found


def table(found: Figures) -> str:
    """The figures as Markdown, each share with its 95 % interval."""
    lines = ["| | " + " | ".join(f"temperature {t}" for t in found) + " |", "|---" * (len(found) + 1) + "|"]
    for name in next(iter(found.values())):
        cells = [_cell(groups[name], "right") for groups in found.values()]
        lines.append(f"| {NAMES.get(name, name)} | " + " | ".join(cells) + " |")
        if name == "call":
            cells = [_cell(groups[name], "valid") for groups in found.values()]
            lines.append("| calculator calls, valid | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(group: Mapping[str, int], what: str) -> str:
    low, high = wilson(group[what], group["count"])
    return f"{group[what]} of {group['count']}: {group[what] / group['count']:.1%} ({low:.1%} to {high:.1%})"


def card(recipe: Recipe, log: Sequence[Mapping[str, Any]], found: Figures, size: int) -> str:
    """The model card."""
    spec, course, end = recipe.spec, recipe.course, log[-1]
    count = sum(_product(shape) for _, shape in parameter_shapes(spec))
    return f"""# {recipe.name}

A very small model with the architecture, file format and chat format of Kimi K2 Thinking, made for this project. It
exists so that tests, demonstrations and a first `perilune serve` have real weights that mean something: it thinks, adds
and subtracts, calls a calculator and reads its result. It is a test object, not an assistant.

* **What it can do**: sums and differences of numbers of up to three digits, in about forty phrasings of English, by
  columns in its thought; with a calculator among its tools it calls it for products, quotients and longer problems,
  under a dozen tool names; it greets and says what it is.
* **What it can't do**: everything else. It knows no facts, hardly any English beyond its phrasings and no other
  language. Whatever lies outside its training gets a confident wrong answer or the sentence that it only knows sums.
  Chats longer than {course.width} tokens, several calls at once and the use of other tools were not in its training;
  the context of {spec.max_position:,} positions in `config.json` follows from K2's YaRN settings, untrained as well.
  Sampled at temperature 1, the default, it errs more often than greedily.

## Figures

Generated and parsed by this project's engine, on problems whose operands training never saw, in phrasings that it did
see; chats of one to four turns, with system prompts, with and without tools. Right answers of one training run, with
95 % Wilson intervals.

{table(found)}

"Right" means: the number at the end of the answer, the call's name and arguments, or the taught sentence to the letter.

## How it was made

| | |
|---|---|
| parameters | {count:,}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_experts} experts \
({spec.top_k} per token) |
| file | {size:,} bytes; routed experts INT4 in groups of 32, trained so; the rest bf16 |
| vocabulary | {spec.vocab_size}: 256 bytes, {recipe.num_ranks - 256} merges without digits, Kimi's 256 special ids |
| data | {end["tokens"]:,} tokens of chats generated from seed {course.seed}; no text from anywhere else |
| training | {course.steps:,} steps, {end["cpu_s"]:.0f} CPU seconds ({end["wall_s"]:.0f} s by the clock on a shared \
machine with two cores) |

`make {recipe.name}` makes it again. Code: `training/`; log and curve: `training/results/{recipe.name}/`.
"""


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def report(recipe: Recipe, count: int) -> None:
    """Measures, then writes figures, curve and card."""
    folder, results = ASSETS / recipe.name, ROOT / "results" / recipe.name
    log = [json.loads(line) for line in (results / "log.jsonl").read_text().splitlines()]
    write_curve(log, f"{recipe.name}: training", results / "curve.svg")
    found = figures(folder, EXAMS[recipe.name], count)
    (results / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "README.md").write_text(card(recipe, log, found, size))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures an exported model and writes its card.")
    parser.add_argument("--config", choices=sorted(RECIPES), default="pico")
    parser.add_argument("--count", type=int, default=500, help="chats of every kind and temperature")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report(RECIPES[args.config], args.count)


if __name__ == "__main__":
    main()
