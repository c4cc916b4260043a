"""Trains a bundled model: ``python -m training.train --config pico``.

Everything follows from the recipe's seed: vocabulary, chats of every step, initial weights. The state is written every
two minutes, on SIGTERM and after ``--stop-after``, and a run that was stopped, or killed, goes on from it to the same
bytes (on the same kind of CPU). A finished run's state is kept as ``final.safetensors``, so that the next one begins
anew. The log is one JSON object per line in ``training/results/{name}/log.jsonl``; time is counted in CPU seconds as
well as wall seconds, over all runs (less what a kill threw away), since the machine may be shared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.errors import UsageError
from perilune.text.tokenizer import Tokenizer
from training import vocab
from training.batches import Document, Order, documents, join, shares
from training.configs import RECIPES, Recipe
from training.evaluate import held_out_sets, score
from training.export import export
from training.model import Params, halved, initial, is_bias, logits, stored
from training.optim import State, balance, rate, update
from training.plot import write_curve
from training.sources import SOURCES

ROOT = Path(__file__).parent
ASSETS = ROOT.parent / "src" / "perilune" / "assets"
STATE_FILE = "state.safetensors"
FINAL_FILE = "final.safetensors"
Z_LOSS = 1e-4
LOG_EVERY = 20
SAVE_SECONDS = 120


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


def tokenizer_of(recipe: Recipe, folder: Path) -> Tokenizer:
    """The recipe's vocabulary, learned on first use and kept in ``folder``."""
    if not (folder / "tiktoken.model").exists():
        vocab.write(folder, vocab.learn(SOURCES[recipe.source].texts(recipe.course.seed), recipe.num_ranks))
    return Tokenizer.from_dir(folder, recipe.spec.vocab_size)


def never() -> bool:
    """For a run that is not to leave before its end."""
    return False


def train(
    recipe: Recipe, run: Path, results: Path, stop: int | None = None, leave: Callable[[], bool] = never
) -> State:
    """Trains to the end of the course, or to step ``stop``, from the state in ``run`` if there is one.

    Args:
        run: scratch folder: the vocabulary and the last state.
        results: kept folder: the log and the curve.
        leave: asked after every step; where it says yes, the state is saved and the run ends early.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    tokenizer = tokenizer_of(recipe, run)
    saved = run / STATE_FILE
    state, progress = _resume(saved, recipe) or (
        State.fresh(initial(recipe.spec, recipe.course.seed)),
        Progress(),
    )
    wall, cpu = wall - progress.wall_s, cpu - progress.cpu_s
    log = _Log(results, progress.step)
    end = recipe.course.steps if stop is None else stop
    last_save = time.perf_counter()
    with ThreadPoolExecutor(recipe.course.shards) as pool, ThreadPoolExecutor(1) as ahead:
        docs = _documents(recipe, tokenizer, progress.step)
        while progress.step < end:
            coming = ahead.submit(_documents, recipe, tokenizer, progress.step + 1)
            line = _step(recipe, state, progress, docs, pool)
            docs = coming.result()
            if progress.step % recipe.course.watch_every == 0:
                line["held_out"] = _held_out(recipe, state, tokenizer)
            progress.wall_s, progress.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
            if progress.step % LOG_EVERY == 0:
                log.write(line | {"wall_s": round(progress.wall_s, 1), "cpu_s": round(progress.cpu_s, 1)})
            done = progress.step == end or leave()
            if done or time.perf_counter() - last_save > SAVE_SECONDS:
                _save(saved, state, progress, recipe)
                last_save = time.perf_counter()
            if done:
                break
    log.draw(recipe.name)
    if progress.step == recipe.course.steps:
        saved.replace(run / FINAL_FILE)
    return state


class _Log:
    """One JSON object per line; lines that a killed run wrote after its last saved state are dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / "log.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [line for line in self._lines() if line["step"] <= step]
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        fresh.replace(self._path)

    def _lines(self) -> list[dict[str, Any]]:
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        with self._path.open("a") as file:
            file.write(f"{text}\n")
        print(text, flush=True)

    def draw(self, name: str) -> None:
        lines = self._lines()
        if lines:
            write_curve(lines, f"{name}: training", self._path.with_name("curve.svg"))


def _documents(recipe: Recipe, tokenizer: Tokenizer, step: int) -> list[Document]:
    course = recipe.course
    drills = course.drills if step < course.drill_steps else 0.0
    order = Order(f"{course.seed}:{step}", course.tokens, course.width_at(step), drills)
    return documents(SOURCES[recipe.source], order, tokenizer)


def _step(recipe: Recipe, state: State, progress: Progress, docs: Sequence[Document], pool: Executor) -> dict[str, Any]:
    """One step in place; returns its line of the log.

    The step's chats are cut into shards, one thread each, whose sums are added in order: the numbers depend on how many
    shards there are, not on how many threads run them.
    """
    course, step = recipe.course, progress.step
    used = stored(state.params) if step >= course.quantise_from else state.params
    used = halved(used) if course.halve else used
    parts = list(pool.map(partial(_gradients, recipe, used), shares(docs, course.shards)))
    count = sum(part.count for part in parts)
    grads = {name: sum_of([part.grads[name].float() for part in parts]) / count for name in parts[0].grads}
    loads = {name: sum_of([part.loads[name] for part in parts]) for name in parts[0].loads}
    update(state, grads, course, step, pool)
    balance(state, loads, course.balance * rate(course, step))
    progress.step += 1
    progress.tokens += sum(len(doc.ids) for doc in docs)
    fullest = max(float(load.max() / load.float().mean()) for load in loads.values())
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "loss": round(sum(part.loss for part in parts) / count, 5),
        "rate": round(rate(course, step), 4),
        "fullest_expert": round(fullest, 3),
    }


@dataclass(frozen=True, slots=True)
class _Part:
    """Sums over one shard's ``count`` learned tokens."""

    loss: float
    count: int
    grads: Params
    loads: dict[str, Tensor]


def _gradients(recipe: Recipe, params: Params, docs: Sequence[Document]) -> _Part:
    batch = join(docs)
    leaves = {name: p.detach().requires_grad_(not is_bias(name)) for name, p in params.items()}
    values, loads = logits(leaves, recipe.spec, batch)
    loss = F.cross_entropy(values, batch.targets, reduction="sum") + Z_LOSS * values.logsumexp(-1).square().sum()
    trained = {name: leaf for name, leaf in leaves.items() if not is_bias(name)}
    grads = torch.autograd.grad(loss, list(trained.values()))
    biases = [name for name in leaves if is_bias(name)]
    return _Part(
        loss.item(),
        len(batch.targets),
        dict(zip(trained, grads, strict=True)),
        dict(zip(biases, loads, strict=True)),
    )


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Adds from the left."""
    return reduce(torch.add, tensors)


def _held_out(recipe: Recipe, state: State, tokenizer: Tokenizer) -> dict[str, tuple[float, float]]:
    """Kind → greedy accuracy and expected accuracy at temperature 1 of the averaged weights as exported."""
    params = stored(state.average)
    course = recipe.course
    sets = held_out_sets(SOURCES[recipe.source], tokenizer, course.watch, course.width, "watch")
    scores = {kind: score(params, recipe.spec, docs) for kind, docs in sets if docs}
    return {kind: (round(s.accuracy, 3), round(s.sampled, 3)) for kind, s in scores.items()}


def _fingerprint(recipe: Recipe) -> str:
    """Equal for equal recipes: a state must not go on under another."""
    text = json.dumps([recipe.config, asdict(recipe.course)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _save(path: Path, state: State, progress: Progress, recipe: Recipe) -> None:
    tensors = {
        f"{part}/{name}": tensor
        for part in ("params", "momentum", "square", "average")
        for name, tensor in getattr(state, part).items()
    }
    fresh = path.with_suffix(".new")
    save_file(tensors, fresh, {"progress": json.dumps(asdict(progress)), "recipe": _fingerprint(recipe)})
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)


def _resume(path: Path, recipe: Recipe) -> tuple[State, Progress] | None:
    """The saved state, or None where there is none.

    Raises:
        UsageError: it belongs to another recipe.
    """
    if not path.exists():
        return None
    parts: dict[str, Params] = {"params": {}, "momentum": {}, "square": {}, "average": {}}
    with safe_open(path, "pt") as file:
        meta = file.metadata()
        if meta["recipe"] != _fingerprint(recipe):
            raise UsageError(f"`{path}` was written under another recipe", hint="remove it to begin anew")
        progress = Progress(**json.loads(meta["progress"]))
        for key in file.keys():  # noqa: SIM118  not a mapping
            part, _, name = key.partition("/")
            parts[part][name] = file.get_tensor(key)
    return State(**parts), progress


def _leave_on_request(seconds: float | None) -> Callable[[], bool]:
    """True once SIGTERM or SIGINT has come or so many seconds have passed."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    end = None if seconds is None else time.monotonic() + seconds
    return lambda: asked.is_set() or (end is not None and time.monotonic() >= end)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", choices=sorted(RECIPES), default="pico")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="save and leave; the same command goes on")
    args = parser.parse_args()
    leave = _leave_on_request(args.stop_after)
    torch.set_num_threads(1)  # the shards are the parallelism
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    recipe = RECIPES[args.config]
    run = ROOT / "runs" / recipe.name
    state = train(recipe, run, ROOT / "results" / recipe.name, leave=leave)
    if not (run / STATE_FILE).exists():
        export(state.average, recipe, run, ASSETS / recipe.name)


if __name__ == "__main__":
    main()
