"""Nano's chats: parsed back by the server's own code, judged right as taught, and free of what is held out."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from training.batches import document, prompt_ids, reply_ids
from training.judge import Spoken, judge, numbers
from training.nano import KINDS, WISHES, sample
from training.nano.heldout import held_out
from training.nano.stories import FRAMES
from training.nano.worked import Step
from training.samples import Message, Sample, Wish
from training.sources import SOURCES

from perilune.chat.messages import check_strict, read_messages, read_tools
from perilune.chat.parse import CallDelta, CallStart, ContentDelta, OutputParser, ReasoningDelta
from perilune.chat.render import render
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason
from training import vocab

UNSEEN = {frame.name for frames in FRAMES.values() for frame in frames if frame.unseen}
STEP = re.compile(r"(?:.*: )?((?:0|[1-9]\d*)[+*/?-](?:0|[1-9]\d*))")


def step(text: str) -> Step:
    a, op, b = re.split(r"([+*/?-])", text)
    return Step(op, int(a), int(b))


def said(chat: Sample) -> list[Message]:
    """All messages of the model, the taught one included."""
    return [message for message in (*chat.messages, chat.reply.message()) if message["role"] == "assistant"]


def spoken(chat: Sample, tokenizer: Tokenizer) -> tuple[Spoken, str, list[str]]:
    """The taught reply as ids, parsed back: what a client sees, the thought, and the calls' ids."""
    tools = read_tools(chat.tools)
    rendered = render(read_messages(chat.messages), tools, tokenizer)
    parser = OutputParser(tokenizer, tools, rendered.history_calls, rendered.starts_in_think)
    events = parser.feed(reply_ids(chat.reply, tokenizer)[:-1]) + parser.finish(FinishReason.STOP)
    starts = [event for event in events if isinstance(event, CallStart)]
    arguments = [
        "".join(e.arguments for e in events if isinstance(e, CallDelta) and e.index == start.index) for start in starts
    ]
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls = tuple((start.name, text) for start, text in zip(starts, arguments, strict=True))
    return Spoken(content, calls, FinishReason.STOP), thought, [start.id for start in starts]


def test_equal_seeds_give_equal_chats_and_others_do_not() -> None:
    first, again, other = (random.Random(seed) for seed in (1, 1, 2))
    one = [sample(first) for _ in range(200)]
    assert one == [sample(again) for _ in range(200)]
    assert one != [sample(other) for _ in range(200)]


def test_training_never_sees_what_is_held_out() -> None:
    rng = random.Random(11)
    seen: set[str] = set()
    for _ in range(10_000):
        chat = sample(rng)
        for trait in chat.traits:
            kind, text = trait.split(":", 1)
            seen.add(kind)
            if kind == "frame":
                assert text not in UNSEEN
            elif kind == "step":
                assert not step(text).held_out, trait
            else:
                assert not held_out(kind, text), trait
        for tool in chat.tools:
            assert not held_out("name", tool["function"]["name"])
        for message in said(chat):
            for line in message["reasoning_content"].split("\n"):
                if found := STEP.fullmatch(line):
                    assert not step(found[1]).held_out, line
    assert seen == {"template", "operands", "frame", "step", "name", "entry", "expression"}


@pytest.mark.parametrize("name", WISHES)
def test_wishes_are_granted(name: str) -> None:
    rng, wish = random.Random(name), WISHES[name]
    for _ in range(40):
        chat = sample(rng, wish)
        assert chat.kind == wish.kind
        of = {kind: {t.split(":", 1)[1] for t in chat.traits if t.startswith(f"{kind}:")} for kind in
              ("template", "operands", "frame", "step", "name", "expression", "entry")}  # fmt: skip
        if wish.kind.startswith("story"):
            assert all(held_out("operands", text) for text in of["operands"])
            assert wish.unseen == bool(of["frame"] & UNSEEN)
            assert wish.unseen or all(held_out("template", text) for text in of["template"])
        elif wish.kind in ("sum", "difference", "product", "quotient", "comparison"):
            assert all(step(text).held_out for text in of["step"])
        assert all(held_out("expression", text) for text in of["expression"])
        assert all(held_out("entry", text) for text in of["entry"] if not text.endswith(":"))
        if wish.unseen:
            assert all(held_out("name", tool["function"]["name"]) for tool in chat.tools)
        if wish.kind in ("call", "parallel", "row"):
            assert bool(chat.reply.calls) == (wish.after_tool is False)


@pytest.mark.parametrize("name", ["", *WISHES])
def test_taught_replies_come_back_through_the_parser_and_are_right(name: str, tokenizer: Tokenizer) -> None:
    rng = random.Random(f"parse {name}")
    for _ in range(25 if name else 400):
        chat = sample(rng, WISHES.get(name, Wish()))
        check_strict(read_messages(chat.messages), read_tools(chat.tools))
        heard, thought, ids = spoken(chat, tokenizer)
        assert (heard.content, thought) == (chat.reply.text, chat.reply.thought)
        assert ids == [call.id for call in chat.reply.calls]
        verdict = judge(chat, heard)
        assert verdict.valid
        assert verdict.right


def test_a_changed_digit_or_word_is_wrong() -> None:
    rng = random.Random(3)
    changed = 0
    for _ in range(1500):
        chat = sample(rng)
        text = chat.reply.text
        heard = Spoken(text, tuple((call.name, call.arguments) for call in chat.reply.calls), FinishReason.STOP)
        for answer in chat.answers:
            if not chat.reply.calls:
                other = str(int(answer) + 1) if answer.isdigit() else "nothing"
                wrong = re.sub(rf"(?<!\w){re.escape(answer)}(?!\w)", other, text)
                assert not judge(chat, replace(heard, content=wrong)).right, (text, wrong)
                changed += 1
        assert not judge(chat, replace(heard, finish=FinishReason.LENGTH)).valid
        if not chat.reply.calls:
            assert not judge(chat, replace(heard, calls=(("get", "{}"),))).right
    assert changed > 1000


def test_calls_are_judged_as_json_in_any_order() -> None:
    rng = random.Random(5)
    for _ in range(200):
        chat = sample(rng, WISHES["parallel"])
        calls = tuple((call.name, call.arguments.replace(": ", ":")) for call in chat.reply.calls)
        heard = Spoken("", calls[::-1], FinishReason.STOP)
        assert judge(chat, heard).right
        assert not judge(chat, replace(heard, calls=calls[:1])).valid
        assert not judge(chat, replace(heard, calls=((calls[0][0], "{}"), *calls[1:]))).valid
        name, arguments = calls[0]
        value = next(iter(json.loads(arguments).values()))
        wrong = json.dumps({k: (v + 1 if isinstance(v, int) else v + "x") for k, v in json.loads(arguments).items()})
        verdict = judge(chat, replace(heard, calls=((name, wrong), *calls[1:])))
        assert not verdict.right
        wrong_type = {k: str(v) if isinstance(v, int) else 7 for k, v in json.loads(arguments).items()}
        assert value != next(iter(wrong_type.values()))
        assert not judge(chat, replace(heard, calls=((name, json.dumps(wrong_type)), *calls[1:]))).valid


def test_calls_take_their_arguments_from_the_chat_and_answers_their_facts_from_results() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        chat = sample(rng, Wish(kind=rng.choice(("call", "parallel", "row", "error"))))
        number, heard = 0, ""
        for message in (*chat.messages, chat.reply.message()):
            for call in message.get("tool_calls", ()):
                function = call["function"]
                assert call["id"] == f"functions.{function['name']}:{number}"
                number += 1
                declared = next(tool["function"] for tool in chat.tools if tool["function"]["name"] == function["name"])
                for key, value in json.loads(function["arguments"]).items():
                    if "enum" not in declared["parameters"]["properties"][key]:
                        expression = re.fullmatch(r"[\d+*/-]+", str(value))
                        parts = re.findall(r"\d+", str(value)) if expression else [str(value)]
                        assert all(part in heard for part in parts), (heard, value)
            heard += message["content"] + "\n"
        results = "\n".join(message["content"] for message in chat.messages if message["role"] == "tool")
        for line in chat.reply.thought.split("\n"):
            _, colon, value = line.rpartition(": ")
            assert not colon or value == "failed" or value in results


def test_only_declared_numbers_are_answered() -> None:
    """A reply brings no number that is neither in the chat nor worked out in its thought."""
    rng = random.Random(8)
    for _ in range(3000):
        chat = sample(rng)
        known = " ".join((*(message["content"] for message in chat.messages), chat.reply.thought))
        found = {number.lstrip("0") for number in re.findall(r"\d+(?:\.\d+)?", known)}
        if chat.kind not in ("talk", "comparison"):
            assert all(number.lstrip("-0") in found for number in numbers(chat.reply.text)), chat.reply


def test_every_kind_comes_up() -> None:
    rng = random.Random(9)
    assert {sample(rng).kind for _ in range(1500)} == set(KINDS)


@pytest.mark.slow
def test_lengths_fit_a_vocabulary_of_1024(tmp_path: Path) -> None:
    vocab.write(tmp_path, vocab.learn(SOURCES["nano"].texts(1), 1024))
    tokenizer = Tokenizer.from_dir(tmp_path, 1024 + 256)
    rng = random.Random("lengths")
    chats = [sample(rng) for _ in range(3000)]
    chats += [sample(rng, wish) for wish in WISHES.values() for _ in range(150)]
    lengths = [len(document(chat, tokenizer).ids) for chat in chats]
    assert max(lengths) <= 2048
    assert max(lengths) > 1500, "long contexts are long"
    assert sum(length < 300 for length in lengths[:3000]) > 0.8 * 3000
    assert max(len(reply_ids(chat.reply, tokenizer)) for chat in chats) <= 512
    assert all(len(prompt_ids(chat, tokenizer)) < 2048 for chat in chats)
