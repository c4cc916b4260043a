"""Measures a model and writes what is known about it: ``python -m training.report --config pico``.

Of a finished one, figures (JSON) and the curve go to ``training/results/{name}/``, the model card into the model's
folder. Of one that is still being trained, ``--from-state --out DIR`` reads the last saved state, exports its average
to ``DIR/{name}`` and writes figures, curve and wrong answers in full to ``DIR``; the run is not disturbed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from perilune.errors import UsageError
from training import cards
from training.cards import CARDS, Facts, Figures, Tally
from training.configs import RECIPES, Recipe
from training.export import export
from training.measure import EXAMS, Answered, measure, open_engine
from training.model import Params, parameter_shapes
from training.plot import write_curve
from training.train import ASSETS, ROOT, STATE_FILE

TEMPERATURES: Final = (0.0, 1.0)
SHOWN: Final = 5
SHOWN_CHARACTERS: Final = 1500


def tally(answers: Iterable[Answered]) -> dict[str, Tally]:
    """Counts by group."""
    found: dict[str, Tally] = defaultdict(lambda: {"count": 0, "valid": 0, "right": 0})
    for answered in answers:
        counted = found[answered.group]
        counted["count"] += 1
        counted["valid"] += answered.verdict.valid
        counted["right"] += answered.verdict.right
    return dict(sorted(found.items()))


def table(found: Figures, model: str = "pico") -> str:
    """The figures as Markdown, each share with its 95 % interval."""
    return cards.table(found, cards.NAMES[model])


def card(recipe: Recipe, log: Sequence[Mapping[str, Any]], found: Figures, size: int) -> str:
    """The model card."""
    return CARDS[recipe.name](Facts(recipe, log, found, size))


def report(recipe: Recipe, count: int) -> None:
    """Measures an exported model, then writes figures, curve and card."""
    folder, results = ASSETS / recipe.name, ROOT / "results" / recipe.name
    log = read_log(results)
    write_curve(log, f"{recipe.name}: training", results / "curve.svg")
    exam = EXAMS[recipe.name]
    engine = open_engine(folder, exam)
    found = {f"{t:g}": tally(measure(engine, exam, count, t)) for t in TEMPERATURES}
    (results / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    (folder / "README.md").write_text(card(recipe, log, found, size))


def report_state(recipe: Recipe, state: Path, out: Path, count: int) -> str:
    """Measures a run as it stands, greedily; returns the figures as Markdown.

    Args:
        state: beside it lies the run's vocabulary.
        out: scratch folder for the model, figures, curve and wrong answers.
    """
    out.mkdir(parents=True, exist_ok=True)
    params, progress = average_of(state, recipe)
    export(params, recipe, state.parent, out / recipe.name)
    exam = EXAMS[recipe.name]
    answers = list(measure(open_engine(out / recipe.name, exam), exam, count, 0.0))
    found = {"0": tally(answers)}
    (out / "figures.json").write_text(json.dumps(progress | {"figures": found}, indent=1) + "\n")
    (out / "wrong.md").write_text("\n".join(wrong(answers)))
    log = [line for line in read_log(ROOT / "results" / recipe.name) if line["step"] <= progress["step"]]
    if log:
        write_curve(log, f"{recipe.name}: training so far", out / "curve.svg")
    return f"step {progress['step']}, {progress['tokens']:,} tokens\n\n{table(found, recipe.name)}"


def average_of(state: Path, recipe: Recipe) -> tuple[Params, dict[str, Any]]:
    """The averaged weights of a saved state and where its run stood.

    Raises:
        UsageError: there is none, or it is not this recipe's.
    """
    if not state.exists():
        raise UsageError(f"there is no saved state at `{state}`", hint="a run writes its first after two minutes")
    with safe_open(state, "pt") as file:
        names = [key for key in file.keys() if key.startswith("average/")]  # noqa: SIM118  not a mapping
        params = {key.removeprefix("average/"): file.get_tensor(key) for key in names}
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
    if {name: tuple(param.shape) for name, param in params.items()} != dict(parameter_shapes(recipe.spec)):
        raise UsageError(f"`{state}` holds another model than {recipe.name}", hint="give its --config")
    return params, progress


def wrong(answers: Iterable[Answered], shown: int = SHOWN) -> Iterator[str]:
    """The first wrong answers of every group as Markdown: what was asked, what was taught, what was said."""
    seen: dict[str, int] = defaultdict(int)
    for answered in answers:
        if answered.verdict.right or seen[answered.group] == shown:
            continue
        seen[answered.group] += 1
        yield f"## {answered.group}, wrong {seen[answered.group]}\n"
        for message in answered.chat.messages:
            yield f"    {message['role']}: {_shortened(_told(message))}"
        said = answered.spoken
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in said.calls]
        message = {"reasoning_content": said.thought, "content": said.content, "tool_calls": calls}
        yield f"    TAUGHT: {_told(answered.chat.reply.message())}"
        yield f"    SAID ({said.finish}): {_told(message)}\n"


def _told(message: Mapping[str, Any]) -> str:
    thought = message.get("reasoning_content")
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    parts = (*((f"<think>{thought}</think>",) if thought else ()), message.get("content") or "", *calls)
    return " ".join(filter(None, parts)).replace("\n", "\n      ")


def _shortened(text: str) -> str:
    """Long chats with their middle left out."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} […] {text[-half:]}"


def read_log(results: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a run may be writing it."""
    path = results / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures a model and writes its card, or how far its training is.")
    parser.add_argument("--config", choices=sorted(RECIPES), default="pico")
    parser.add_argument("--count", type=int, help="chats of every kind and temperature [500; 100 with --from-state]")
    parser.add_argument(
        "--from-state", nargs="?", type=Path, const=Path(), metavar="FILE", help="of a run [the run of --config]"
    )
    parser.add_argument("--out", type=Path, help="folder for what --from-state finds")
    args = parser.parse_args()
    if (args.from_state is None) != (args.out is None):
        parser.error("--from-state and --out belong together")
    torch.set_num_threads(1)
    recipe = RECIPES[args.config]
    if args.out is None:
        report(recipe, args.count or 500)
        return
    state = args.from_state if args.from_state != Path() else ROOT / "runs" / recipe.name / STATE_FILE
    print(report_state(recipe, state, args.out, args.count or 100))


if __name__ == "__main__":
    main()
