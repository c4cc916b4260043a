"""The ignore list of a quantiser means what ``re.match`` would make of it, at no risk."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.checkpoint.ignored import IgnoreList

KIMI = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@pytest.mark.parametrize(
    ("module", "listed"),
    [
        ("lm_head", True),
        ("lm_head.x", False),
        ("model.lm_head", False),
        ("model.layers.3.self_attn.o_proj", True),
        ("model.layers.0.mlp.gate_proj", True),
        ("model.layers.0.mlp.gate_up_proj", True),
        ("model.layers.1.mlp.shared_experts.down_proj", True),
        ("model.layers.1.mlp.experts.0.gate_proj", False),
        ("model.layers.1.mlp.gate", False),
    ],
)
def test_kimis_list(module: str, listed: bool) -> None:
    assert IgnoreList(KIMI).matches(module) is listed


PATTERNS = [
    "a", "a$", "^a.*b", ".*", ".*$", "", "$", "a.b", r"a\.b", "(a|b)c$", "a(|b)c", ".*a.*a$", ".*(ab|a)b$",
    "x.*(a.|b)c.*a", "..*a",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(pattern=st.sampled_from(PATTERNS), name=st.text(alphabet="abcx.", max_size=8))
def test_patterns_mean_what_re_makes_of_them(pattern: str, name: str) -> None:
    assert IgnoreList([f"re:{pattern}"]).unclear == ()
    assert IgnoreList([f"re:{pattern}"]).matches(name) is (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "a*", "a+b", "[ab]", "(a|b)*", "((a))", "a{3}", "(?i)a", r"\d", "(", "a|b"]
)
def test_other_forms_are_unclear_and_match_nothing(pattern: str) -> None:
    ignore = IgnoreList(["lm_head", f"re:{pattern}"])
    assert ignore.unclear == (f"re:{pattern}",)
    assert ignore.matches("lm_head")
    assert not ignore.matches("a")


def test_a_hostile_list_costs_little() -> None:
    start = time.perf_counter()
    ignore = IgnoreList(["re:" + ".*a" * 50 + "$", "re:" + "(a|b|c|d)" * 40, *["re:(a|b).*x"] * 1000])
    assert len(ignore.unclear) > 1
    assert not any(ignore.matches("a" * 200 + str(number)) for number in range(20))
    assert time.perf_counter() - start < 2
