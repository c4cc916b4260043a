"""Tool-call ids of a history: numbered in order, results paired, a grown history keeps its prefix."""

from __future__ import annotations

import time
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from perilune.chat.ids import canonical_ids
from perilune.chat.messages import FunctionCall, Message, ToolCall


def _turn(*ids: str | None, name: str = "f") -> Message:
    return Message(role="assistant", tool_calls=[ToolCall(FunctionCall(name, "{}"), id=call_id) for call_id in ids])


def _result(call_id: str | None) -> Message:
    return Message(role="tool", tool_call_id=call_id)


def _numbers(*messages: Message) -> list[str]:
    """Which call each result answers, by number; ids that name none as they are."""
    return [new.removeprefix("functions.f:") for _, new in sorted(canonical_ids(messages).results.items())]


def test_calls_are_numbered_over_the_whole_conversation() -> None:
    user = Message(role="user", content="x")
    ids = canonical_ids(
        [user, _turn("a", "b", name="g"), _result("a"), user, _turn("call_9"), Message(role="assistant")]
    )
    assert ids.calls == {1: ("functions.g:0", "functions.g:1"), 4: ("functions.f:2",)}
    assert ids.results == {2: "functions.g:0"}
    assert ids.count == 3


def test_results_are_paired_by_id_in_any_order() -> None:
    assert _numbers(_turn("a", "b", "c"), _result("c"), _result("a"), _result("b")) == ["2", "0", "1"]


def test_repeated_ids_are_paired_in_order_and_per_turn() -> None:
    assert _numbers(_turn("a", "a"), _result("a"), _result("a")) == ["0", "1"]
    assert _numbers(_turn("a"), _result("a"), _turn("a"), _result("a")) == ["0", "1"]
    assert _numbers(_turn("a"), _turn("a"), _result("a")) == ["1"]


def test_missing_and_unknown_ids_take_what_is_left_in_order() -> None:
    assert _numbers(_turn(None, None), _result(None), _result(None)) == ["0", "1"]
    assert _numbers(_turn("a", "b", "c"), _result("?"), _result("a"), _result(None)) == ["1", "0", "2"]
    assert _numbers(_turn("a", "b"), _result("a"), _result("a")) == ["0", "1"]


def test_late_repeated_and_orphaned_results() -> None:
    assert _numbers(_turn("a"), _turn("b"), _result("a"), _result("b")) == ["0", "1"]
    assert _numbers(_turn("a"), _result("a"), _result("a")) == ["0", "0"]
    assert _numbers(_result("ghost"), _turn("a"), _result("a"), _result("?"), _result(None)) == ["ghost", "0", "?", ""]
    # The first turn's call was answered, by a result without an id: the second turn's has its own.
    assert _numbers(_turn("a"), _result(None), _turn("b"), _result("a"), _result("b")) == ["0", "0", "1"]


names = st.sampled_from(["a", "b", None, "functions.f:0"])
turns = st.lists(
    st.one_of(
        st.lists(names, min_size=1, max_size=3).map(lambda ids: _turn(*ids)),
        names.map(_result),
        st.just(Message(role="user", content="x")),
    ),
    max_size=12,
)


@given(turns)
def test_ids_are_canonical_and_a_grown_history_keeps_its_prefix(messages: list[Message]) -> None:
    whole = canonical_ids(messages)
    told = [new for index in sorted(whole.calls) for new in whole.calls[index]]
    assert told == [f"functions.f:{number}" for number in range(whole.count)]
    assert sorted(whole.results) == [index for index, message in enumerate(messages) if message.role == "tool"]
    for end, message in enumerate(messages):
        if message.tool_calls:  # the turn before is complete
            before = canonical_ids(messages[:end])
            assert before.calls.items() <= whole.calls.items()
            assert before.results.items() <= whole.results.items()


@given(st.lists(st.integers(1, 3), max_size=5), st.randoms(use_true_random=False))
def test_a_well_formed_history_is_paired_exactly(sizes: list[int], random: Random) -> None:
    messages: list[Message] = []
    expected: list[str] = []
    number = 0
    for size in sizes:
        ids = [f"call_{number + offset}" for offset in range(size)]
        messages.append(_turn(*ids))
        order = list(range(size))
        random.shuffle(order)
        messages += [_result(ids[offset]) for offset in order]
        expected += [str(number + offset) for offset in order]
        number += size
    assert _numbers(*messages) == expected


def test_linear_in_calls() -> None:
    started = time.perf_counter()
    same = [_turn(*["a"] * 20_000), *[_result("a")] * 20_000, *[_turn("b")] * 10_000, *[_result("?")] * 10_000]
    assert canonical_ids(same).count == 30_000
    assert time.perf_counter() - started < 5  # 0.1 s here
