"""Trains a bundled model: ``python -m training.train --config pico``.

Everything follows from the recipe's seed: vocabulary, chats of every step, initial weights. The state is written now
and then, and a run that was stopped goes on from it to the same bytes (on the same kind of CPU). A finished run's
state is kept as ``final.safetensors``, so that the next one begins anew. The log is one JSON object per line in
``training/results/{name}/log.jsonl``; time is counted in CPU seconds as well as wall seconds, since the machine may be
shared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
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

from perilune.chat.render import DEFAULT_SYSTEM
from perilune.errors import UsageError
from perilune.text.tokenizer import Tokenizer
from training import vocab
from training.batches import Document, documents, pack
from training.chats import sample
from training.configs import RECIPES, Recipe
from training.evaluate import held_out_sets, score
from training.export import export
from training.model import Params, initial, is_bias, logits, stored
from training.optim import State, balance, rate, update
from training.samples import Sample

ROOT = Path(__file__).parent
ASSETS = ROOT.parent / "src" / "perilune" / "assets"
STATE_FILE = "state.safetensors"
FINAL_FILE = "final.safetensors"
Z_LOSS = 1e-4
LOG_EVERY = 20
SAVE_EVERY = 200
VOCAB_CHATS = 4000


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0


def texts(seed: int) -> Iterator[str]:
    """The plain texts of chats that the vocabulary is learned on."""
    rng = random.Random(f"{seed}:vocabulary")
    for _ in range(VOCAB_CHATS):
        yield from _texts_of(sample(rng))


def _texts_of(chat: Sample) -> Iterator[str]:
    yield DEFAULT_SYSTEM
    if chat.tools:
        yield json.dumps(chat.tools, separators=(",", ":"))
    for message in (*chat.messages, chat.reply.message()):
        yield from (message["role"], message["content"], message.get("reasoning_content", ""))
        for call in message.get("tool_calls", ()):
            yield from (call["id"], call["function"]["arguments"])


def tokenizer_of(recipe: Recipe, folder: Path) -> Tokenizer:
    """The recipe's vocabulary, learned on first use and kept in ``folder``."""
    if not (folder / "tiktoken.model").exists():
        vocab.write(folder, vocab.learn(texts(recipe.course.seed), recipe.num_ranks))
    return Tokenizer.from_dir(folder, recipe.spec.vocab_size)


def train(recipe: Recipe, run: Path, results: Path, stop: int | None = None) -> State:
    """Trains to the end of the course, or to step ``stop``, from the state in ``run`` if there is one.

    Args:
        run: scratch folder: the vocabulary and the last state.
        results: kept folder: the log.
    """
    tokenizer = tokenizer_of(recipe, run)
    saved = run / STATE_FILE
    state, progress = _resume(saved, recipe) or (
        State.fresh(initial(recipe.spec, recipe.course.seed)),
        Progress(),
    )
    results.mkdir(parents=True, exist_ok=True)
    log = results / "log.jsonl"
    _keep_lines_before(log, progress.step)
    end = recipe.course.steps if stop is None else stop
    wall, cpu = time.perf_counter() - progress.wall_s, time.process_time() - progress.cpu_s
    pool = ThreadPoolExecutor(recipe.course.shards)
    while progress.step < end:
        line = _step(recipe, state, progress, tokenizer, pool)
        progress.wall_s, progress.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        if progress.step % LOG_EVERY == 0:
            line |= {"wall_s": round(progress.wall_s, 1), "cpu_s": round(progress.cpu_s, 1)}
            if progress.step % SAVE_EVERY == 0:
                line["held_out"] = _held_out(recipe, state, tokenizer)
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
        if progress.step % SAVE_EVERY == 0 or progress.step == end:
            _save(saved, state, progress, recipe)
    if end == recipe.course.steps:
        saved.replace(run / FINAL_FILE)
    return state


def _step(recipe: Recipe, state: State, progress: Progress, tokenizer: Tokenizer, pool: Executor) -> dict[str, Any]:
    """One step in place; returns its line of the log.

    The step's chats are cut into shards, one thread each, whose sums are added in order: the numbers depend on how many
    shards there are, not on how many threads run them.
    """
    course, step = recipe.course, progress.step
    drills = course.drills if step < course.drill_steps else 0.0
    docs = documents(f"{course.seed}:{step}", course.tokens, course.width, tokenizer, drills)
    shards = [docs[shard :: course.shards] for shard in range(course.shards)]
    parts = list(pool.map(partial(_gradients, recipe, state.params, step >= course.quantise_from), shards))
    count = sum(part.count for part in parts)
    grads = {name: sum_of([part.grads[name] for part in parts]) / count for name in parts[0].grads}
    loads = {name: sum_of([part.loads[name] for part in parts]) for name in parts[0].loads}
    update(state, grads, course, step)
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


def _gradients(recipe: Recipe, params: Params, quantise: bool, docs: Sequence[Document]) -> _Part:
    batch = pack(docs, recipe.course.width)
    leaves = {name: p.detach().requires_grad_(not is_bias(name)) for name, p in params.items()}
    values, loads = logits(stored(leaves) if quantise else leaves, recipe.spec, batch)
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
    sets = held_out_sets(tokenizer, 60, recipe.course.width, "watch")
    scores = {kind: score(params, recipe.spec, docs) for kind, docs in sets}
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


def _keep_lines_before(log: Path, step: int) -> None:
    """Drops lines that a stopped run wrote after its last saved state."""
    if log.exists():
        kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= step]
        log.write_text("".join(f"{line}\n" for line in kept))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", choices=sorted(RECIPES), default="pico")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the shards are the parallelism
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    recipe = RECIPES[args.config]
    run = ROOT / "runs" / recipe.name
    state = train(recipe, run, ROOT / "results" / recipe.name)
    export(state.average, recipe, run, ASSETS / recipe.name)


if __name__ == "__main__":
    main()
