"""Does the bundled model do what its card says when a client asks for it? One server, real requests, held-out problems.

Starts a real ``perilune serve`` and asks over HTTP as OpenAI's clients do, tools included. ``ready_s``: from the
command to its banner. ``ttft_ms``, ``tok_s``: one stream at a time, from sending to the first delta, and tokens after
it per second, medians. Then the model's exam (``training.measure``), answers whole, so many requests at once that the
engine's batch stays full; verdicts are ``training.judge``'s. A request that fails counts as wrong, and as failed.

Each figure is counted over ``--count`` problems, shared out evenly among its kinds and drawn from another seed than
the card's. ``--long`` adds chats of some 1,150 to 2,048 tokens, ``--long-count`` for each figure. ``--gsm8k
FILE`` asks real questions with the taught wish for ``####``: what stands behind it, or the last number where nothing
does.

    python benchmarks/serve_smoke.py --json --model nano --count 10000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.load.client import Address
from benchmarks.load.facts import machine
from benchmarks.load.server import serve
from training.evaluate import wilson
from training.judge import Spoken, Verdict, judge
from training.measure import EXAMS, Exam, group
from training.samples import Reply, Sample

from perilune.types import FinishReason

ROOT: Final = Path(__file__).resolve().parent.parent
ASSETS: Final = ROOT / "src" / "perilune" / "assets"
DEADLINE_S: Final = 300.0
BATCH: Final = 32
SPARE: Final = 8  # clients beyond the batch: one always waits when another has its answer
STREAMS: Final = 9
WISH: Final = " End with #### and the number."
_MARKED: Final = re.compile(r"####\s*(-?[\d,]*\d(?:\.\d+)?)")
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Figure:
    """A share that is printed: what counts, which of the exam's kinds, the bar (0: none)."""

    name: str
    what: str
    kinds: tuple[str, ...]
    bar: float = 0.0


CALLS: Final = ("call", "parallel", "row")
RESULTS: Final = ("answer", "call, answer", "parallel, answer", "row, answer")
FIGURES: Final = (
    Figure("sums", "right", ("sum", "difference"), 0.95),
    Figure("word_problems", "right", ("story2",), 0.85),
    Figure("tool_valid", "valid", CALLS, 0.98),
    Figure("tool_right", "right", CALLS, 0.95),
    Figure("after_result", "right", RESULTS, 0.90),
)
LONG: Final = (
    Figure("sums", "right", ("sum, long",)),
    Figure("word_problems", "right", ("story2, long",)),
    Figure("tool_valid", "valid", ("call, long",)),
    Figure("tool_right", "right", ("call, long",)),
    Figure("recall", "right", ("recall, long",)),
)


@dataclass(slots=True)
class Tally:
    """Verdicts on one kind."""

    count: int = 0
    valid: int = 0
    right: int = 0

    def add(self, verdict: Verdict) -> None:
        """One more."""
        self.count += 1
        self.valid += verdict.valid
        self.right += verdict.right


@dataclass(slots=True)
class Client:
    """Asks one server. ``failed``: requests without a whole answer, by reason; ``tokens``: of all whole answers."""

    http: httpx.AsyncClient
    model: str
    temperature: float
    max_tokens: int
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tokens: int = 0

    def body(self, chat: Sample, seed: int) -> dict[str, Any]:
        """The request."""
        sampling = {"temperature": self.temperature, "seed": seed, "max_tokens": self.max_tokens}
        tools = {"tools": list(chat.tools)} if chat.tools else {}
        return {"model": self.model, "messages": list(chat.messages), **tools, **sampling}

    async def ask(self, chat: Sample, seed: int) -> Spoken:
        """The whole answer; an empty one that did not end where there is none."""
        try:
            response = await self.http.post("/v1/chat/completions", json=self.body(chat, seed))
            if response.status_code == httpx.codes.OK:
                answer = response.json()
                self.tokens += answer["usage"]["completion_tokens"]
                return spoken(answer["choices"][0])
            self.failed[f"status {response.status_code}"] += 1
        except httpx.HTTPError as error:
            self.failed[type(error).__name__] += 1
        return Spoken("", (), FinishReason.ERROR)

    async def time(self, chat: Sample) -> tuple[float, float]:
        """One stream: seconds to its first delta, and tokens per second after it."""
        body = self.body(chat, 0) | {"stream": True, "stream_options": {"include_usage": True}}
        began, first, last, tokens = time.perf_counter(), 0.0, 0.0, 0
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if any(_says(choice["delta"]) for choice in event["choices"]):
                    last = time.perf_counter()
                    first = first or last
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if tokens < 2 or last <= first:
            raise RuntimeError(f"a stream told {tokens} tokens: nothing to time (status {response.status_code})")
        return first - began, (tokens - 1) / (last - first)


def _says(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


def spoken(choice: Mapping[str, Any]) -> Spoken:
    """A choice of a whole answer as the judge reads it."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    ended = choice["finish_reason"] in ("stop", "tool_calls")
    return Spoken(
        message["content"] or "",
        tuple((call["name"], call["arguments"]) for call in calls),
        FinishReason.STOP if ended else FinishReason.LENGTH,
        message.get("reasoning_content") or "",
    )


def exam_of(model: str) -> tuple[Exam, str]:
    """The exam and the folder of a bundled model, or of a model folder named after one, such as ``out/nano``."""
    name = Path(model).name
    if name not in EXAMS:
        raise SystemExit(f"no exam for {model!r}: the last part of a path must be one of {', '.join(sorted(EXAMS))}")
    return EXAMS[name], str(ASSETS / name if model == name else Path(model))


def problems(exam: Exam, figures: Sequence[Figure], count: int, seed: int) -> Iterator[tuple[str, Sample]]:
    """``count`` chats for every figure whose kinds the exam has, each chat once however many figures count it."""
    wanted: dict[str, int] = {}
    for figure in figures:
        kinds = [kind for kind in figure.kinds if kind in exam.wishes]
        wanted |= {kind: -(-count // len(kinds)) for kind in kinds}
    for kind, number in wanted.items():
        rng = random.Random(f"serve {seed}:{kind}")
        left = number
        while left:
            chat = exam.sample(rng, exam.wishes[kind])
            if not group(kind, chat).endswith(" 1 digits"):  # the bar is on two and three
                yield kind, chat
                left -= 1


async def answer_all(client: Client, asked: Sequence[tuple[str, Sample]], clients: int) -> list[Spoken]:
    """Answers in order, ``clients`` requests at once; says how far it is every ten seconds."""
    answers: dict[int, Spoken] = {}
    numbers = iter(range(len(asked)))
    began = told = time.monotonic()

    async def work() -> None:
        nonlocal told
        for index in numbers:
            answers[index] = await client.ask(asked[index][1], index)
            if (now := time.monotonic()) > told + 10:
                told = now
                _say(f"{len(answers)} of {len(asked)} answered in {now - began:.0f} s")

    await asyncio.gather(*(work() for _ in range(clients)))
    return [answers[index] for index in range(len(asked))]


def shares(tallies: Mapping[str, Tally], figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """Figure → right of count, share, interval and the bar; figures without any problem are left out."""
    found = {}
    for figure in figures:
        counted = [tallies[kind] for kind in figure.kinds if kind in tallies]
        if counted:
            right = sum(getattr(tally, figure.what) for tally in counted)
            found[figure.name] = _share(right, sum(tally.count for tally in counted)) | {"bar": figure.bar or None}
    return found


def _share(right: int, count: int) -> dict[str, Any]:
    low, high = wilson(right, count)
    return {
        "right": right,
        "count": count,
        "share": round(right / count, 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }


async def sit(
    client: Client, asked: Sequence[tuple[str, Sample]], figures: Sequence[Figure], clients: int
) -> dict[str, Any]:
    """The exam: figures, the kinds that they come from, and how fast it went."""
    tokens, began = client.tokens, time.monotonic()
    answers = await answer_all(client, asked, clients)
    took = time.monotonic() - began
    tallies: dict[str, Tally] = defaultdict(Tally)
    for (kind, chat), answer in zip(asked, answers, strict=True):
        tallies[kind].add(judge(chat, answer))
    kinds = {
        kind: {what: _share(getattr(tally, what), tally.count) for what in ("valid", "right")}
        for kind, tally in tallies.items()
    }
    return {
        "accuracy": shares(tallies, figures),
        "kinds": kinds,
        "seconds": round(took, 1),
        "batched_tok_s": round((client.tokens - tokens) / took, 1),
    }


async def speed(client: Client, exam: Exam) -> dict[str, Any]:
    """One stream at a time. The first is not counted: it warms the engine."""
    rng = random.Random("serve:speed")
    wish = exam.wishes["sum"]
    timed = [await client.time(exam.sample(rng, wish)) for _ in range(STREAMS)][1:]
    return {
        "ttft_ms": round(1e3 * statistics.median(ttft for ttft, _ in timed), 1),
        "tok_s": round(statistics.median(rate for _, rate in timed), 1),
    }


def number(text: str) -> float | None:
    """The number behind the last ``####``, thousands' commas dropped, otherwise the last one of all."""
    found = _MARKED.findall(text) or _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def gsm8k_rows(path: Path, count: int | None) -> list[tuple[Sample, float | None]]:
    """Questions with the wish for ``####``, and what is behind the mark of the taught answers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()][:count]
    return [(_question(row["question"] + WISH), number(row["answer"])) for row in rows]


def _question(text: str) -> Sample:
    """A chat of which only the request matters."""
    return Sample("gsm8k", ({"role": "user", "content": text},), (), Reply("", ""))


async def gsm8k(client: Client, rows: Sequence[tuple[Sample, float | None]], clients: int) -> dict[str, Any]:
    """The test set's score. ``marked``: answers that kept the convention, right or wrong."""
    answers = await answer_all(client, [("gsm8k", chat) for chat, _ in rows], clients)
    right = sum(
        answer.finish == FinishReason.STOP and number(answer.content) == wanted
        for (_, wanted), answer in zip(rows, answers, strict=True)
    )
    return _share(right, len(rows)) | {"marked": sum("####" in answer.content for answer in answers)}


async def run_all(args: argparse.Namespace, exam: Exam, address: Address, model: str) -> dict[str, Any]:
    """Everything on one server."""
    rows = gsm8k_rows(args.gsm8k, args.gsm8k_count) if args.gsm8k else []
    long = list(problems(exam, LONG, args.long_count, args.seed)) if args.long else []
    limits = httpx.Limits(max_connections=args.clients)
    base = f"http://{address[0]}:{address[1]}"
    async with httpx.AsyncClient(base_url=base, timeout=DEADLINE_S, limits=limits) as http:
        client = Client(http, model, args.temperature, exam.max_tokens)
        summary: dict[str, Any] = await speed(client, exam)
        summary |= await sit(client, list(problems(exam, FIGURES, args.count, args.seed)), FIGURES, args.clients)
        if long:
            summary["long"] = await sit(client, long, LONG, args.clients)
        if rows:
            summary["gsm8k"] = await gsm8k(client, rows, args.clients)
        return summary | {"failed": dict(client.failed)}


def table(summary: Mapping[str, Any]) -> str:
    """The figures for a reader."""
    lines = [f"ready after {summary['ready_s']} s, first delta after {summary['ttft_ms']} ms, {summary['tok_s']} tok/s"]
    rows = {**summary["accuracy"], **{f"{k}, long": v for k, v in summary.get("long", {}).get("accuracy", {}).items()}}
    rows |= {"gsm8k": summary["gsm8k"]} if "gsm8k" in summary else {}
    for name, row in rows.items():
        bar = f"  bar {row['bar']:.0%}" if row.get("bar") else ""
        interval = f"({row['low']:.1%} to {row['high']:.1%})"
        lines.append(f"{name:20} {row['right']:6} of {row['count']:6}  {row['share']:6.1%}  {interval}{bar}")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _holds(summary: Mapping[str, Any]) -> bool:
    return not summary["failed"] and all(row["share"] >= (row["bar"] or 0.0) for row in summary["accuracy"].values())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a bar was missed or a request failed."""
    parser = argparse.ArgumentParser(description="Serve a bundled model and let it sit its exam over HTTP.")
    parser.add_argument("--model", default="pico", help="pico, nano, or a folder whose name is one of them")
    parser.add_argument("--count", type=int, default=300, help="problems of each figure; 10000 for the record")
    parser.add_argument(
        "--long", action="store_true", help="also in chats of up to 2,048 tokens, where the model has them"
    )
    parser.add_argument("--long-count", type=int, default=200, help="problems of each of those figures")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="also score GSM8K's test.jsonl")
    parser.add_argument("--gsm8k-count", type=int, help="only so many of its questions")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--clients", type=int, default=BATCH + SPARE, help="requests at once")
    parser.add_argument("--server-option", action="append", default=[], help="more for perilune serve; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on stdout")
    args = parser.parse_args(argv)
    exam, folder = exam_of(args.model)
    room = [
        "--max-model-len",
        str(exam.context),
        "--max-num-seqs",
        str(BATCH),
        "--kv-tokens",
        str(BATCH * exam.context),
    ]
    began = time.monotonic()
    with (
        serve([folder, *room, *args.server_option]) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        ready = {"model": args.model, "temperature": args.temperature, "ready_s": round(time.monotonic() - began, 2)}
        summary = ready | runner.run(run_all(args, exam, server.address, Path(folder).name)) | {"machine": machine()}
    summary["holds"] = _holds(summary)
    short = ", ".join(f"{name} {row['share']:.1%}" for name, row in summary["accuracy"].items())
    _say(f"{summary['ready_s']} s to ready, {summary['ttft_ms']} ms, {summary['tok_s']} tok/s; {short}")
    print(json.dumps(summary) if args.json else table(summary))
    return 0 if summary["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
