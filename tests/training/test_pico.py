"""The bundled pico, through the engine that serves it: the gate of every change to either."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from training.chats import PLAIN_CALCULATOR, sample
from training.configs import PICO
from training.judge import judge
from training.measure import open_engine, speak
from training.samples import Sample, Wish

import perilune
from perilune.engine.engine import Engine

PICO_FOLDER = Path(perilune.__file__).parent / "assets" / "pico"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(PICO_FOLDER)


def ask(engine: Engine, question: str) -> tuple[str, str]:
    """Content and finish of a greedy answer under the default system prompt."""
    nothing = sample(random.Random(0), Wish(kind="talk", turns=1)).reply
    chat = Sample("talk", ({"role": "user", "content": question},), (), nothing)
    (spoken,) = speak(engine, [chat], 0.0)
    return spoken.content, str(spoken.finish)


def test_the_folder_holds_the_recipe(engine: Engine) -> None:
    assert engine.worker.network.spec == PICO.spec


def test_held_out_sums_are_right(engine: Engine) -> None:
    rng = random.Random("gate")
    chats = [sample(rng, Wish(kind="sum", held_out=True, turns=1)) for _ in range(40)]
    right = sum(judge(chat, spoken).right for chat, spoken in zip(chats, speak(engine, chats, 0.0), strict=True))
    assert right >= 38


def test_a_calculator_is_called_and_its_result_read(engine: Engine) -> None:
    for after in (False, True):
        rng = random.Random("gate")
        wish = Wish(kind="call", held_out=True, turns=1, after_tool=after, tools=(PLAIN_CALCULATOR,))
        chats = [sample(rng, wish) for _ in range(10)]
        verdicts = [judge(chat, spoken) for chat, spoken in zip(chats, speak(engine, chats, 0.0), strict=True)]
        assert sum(verdict.valid for verdict in verdicts) >= 9
        assert sum(verdict.right for verdict in verdicts) >= 8


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 12 + 34?", "12 + 34 = 46."),
        ("Who are you?", "I am pico, a very small model with the architecture of Kimi K2."),
        ("What is 12 * 34?", "I need a calculator for 12 * 34."),
    ],
)
def test_answers_to_show(engine: Engine, question: str, answer: str) -> None:
    assert ask(engine, question) == (answer, "stop")
