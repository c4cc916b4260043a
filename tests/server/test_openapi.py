"""The description: complete, true to the checks, and no input that it allows or forbids makes the server fail."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig

from perilune.errors import RequestError
from perilune.server.app import routes_of
from perilune.server.fields import Fields
from perilune.server.generation import Services
from perilune.server.limits import Limits
from perilune.server.metrics import Metrics
from perilune.server.openapi import document
from perilune.server.params import Param
from perilune.server.schema import CHAT
from perilune.server.state import ServerState
from perilune.server.text_schema import COMPLETION, DETOKENIZE, TOKENIZE
from perilune.server.tokenpool import TokenPool

if TYPE_CHECKING:
    from tests.server.conftest import Served

TABLES = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "TokenizeRequest": TOKENIZE,
    "DetokenizeRequest": DETOKENIZE,
}
DOCUMENT = document(Limits())


def test_every_route_is_described(server: Served) -> None:
    told = httpx.get(f"{server.url}/openapi.json").json()
    assert told == json.loads(json.dumps(document(server.state.limits)))
    described = {
        (path.replace("{name}", "{name:path}"), method.upper())
        for path, methods in told["paths"].items()
        for method in methods
    }
    state = ServerState(("m",))
    routes = routes_of(Services(state, TokenPool(), Metrics(state)))
    # An application as endpoint takes what its route says; a function's route takes GET (and HEAD with it).
    assert described == {(route.path, method) for route in routes for method in {*(route.methods or ())} - {"HEAD"}}


@pytest.mark.parametrize("name", TABLES)
def test_every_checked_field_is_described_and_no_other(name: str) -> None:
    asked: set[str] = set()

    class Noting(dict[str, object]):
        def get(self, key: str, default: object = None) -> object:
            asked.add(key)
            return default

    body = Noting()
    for param in TABLES[name]:
        try:
            param.read(Fields(body))
        except RequestError:
            continue
    assert asked == set(DOCUMENT["components"]["schemas"][name]["properties"])


NUMBERS = {
    f"{name}.{param.name}": param
    for name, table in TABLES.items()
    for param in table
    if param.schema.get("type") in ("integer", "number")
}


@pytest.mark.parametrize("param", NUMBERS.values(), ids=NUMBERS.keys())
@given(value=st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.text(max_size=3))
@settings(max_examples=60)
def test_numbers_are_taken_just_where_the_description_says(param: Param[Any], value: Any) -> None:
    low, high = cast("float", param.schema["minimum"]), cast("float", param.schema["maximum"])
    kinds = (int,) if param.schema["type"] == "integer" else (int, float)
    allowed = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    if allowed and 0 < abs(value) < 1e-6:
        return
    try:
        param.read(Fields({"logprobs": True, "echo": True, param.name: value}))
    except RequestError:
        assert not allowed
    else:
        assert allowed


def test_the_page_needs_nothing_from_outside(server: Served) -> None:
    response = httpx.get(f"{server.url}/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", response.text)
    assert "<script" not in response.text
    for path in DOCUMENT["paths"]:
        assert path in response.text
    for table in TABLES.values():
        for param in table:
            assert f"<code>{param.name}</code>" in response.text


schema = schemathesis.openapi.from_dict(DOCUMENT, config=SchemathesisConfig())


@schema.parametrize()
@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nothing_makes_the_server_fail(case: schemathesis.Case[Any], server: Served) -> None:
    """Generated from the description, both what it allows and what it doesn't."""
    if isinstance(case.body, dict) and case.path.startswith("/v1/"):
        case.body = {"max_tokens": 2, **case.body}
    response = case.call(base_url=server.url, timeout=30)
    case.validate_response(response, checks=[not_a_server_error])
