"""Keys: what a file may hold, whose a request is, and that nothing but the health paths answers without one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.routing import Route, Router

from perilune.cli.main import run
from perilune.errors import UsageError
from perilune.server.app import build_app
from perilune.server.auth import Key, KeyLimits, KeyRing, key_of, read_keys
from perilune.server.edge import OPEN
from perilune.server.limits import Limits
from perilune.server.runner import Load, Loaded, Running, background, bind
from perilune.server.state import SamplingDefaults, ServerState

if TYPE_CHECKING:
    from tests.server.conftest import Script, ScriptFactory

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    text = f'alice = "{ALICE}"\n[bob]\nsha256 = "{digest}"\nconcurrency = 2\ntokens_per_minute = 9\npriority = [0, 5]\n'
    keys = read_keys(write(tmp_path / "keys.toml", text, 0o640))
    assert [key.name for key in keys] == ["alice", "bob"]
    assert keys[1].limits == KeyLimits(concurrency=2, tokens_per_minute=9, priority=(0, 5))
    ring = KeyRing(keys)
    for secret, name in ((ALICE, "alice"), (BOB, "bob")):
        found = ring.find([f"Bearer {secret}"])
        assert found is not None
        assert found.name == name
    assert ALICE not in repr(keys)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no keys"),
        ("alice: sk-0123456789abcdef", "is not TOML"),
        ('alice = "short"', "entry 1: the key is not usable: 16 to 512"),
        ('alice = "sk with spaces 0123456789"', "is not usable"),
        (f'alice = "{ALICE}"\nbob = "{ALICE}"', "the same key under two names"),
        (f'alice = "{ALICE}"\nbob = 5', "entry 2 is neither a text nor a table"),
        ("[alice]\nconcurrency = 1", "either `key` or `sha256`"),
        (f'[alice]\nkey = "{ALICE}"\nconcurency = 1', "entry 1 has an unknown field `concurency`"),
        (f'[alice]\nkey = "{ALICE}"\nconcurrency = 0', ">= 1"),
        (f'[alice]\nkey = "{ALICE}"\npriority = [5, 1]', "lower end comes first"),
        ('[alice]\nsha256 = "abc"', "sha256"),
        (f'"a b" = "{ALICE}"', "entry 1: what stands before the = is no name"),
        (f'"{ALICE}" = "alice-who-has-a-long-name"', "entry 1: what stands before the = is no name"),
        (f'bob = "{BOB}"\n{ALICE} = "{ALICE}"', "entry 2: what stands before the = is no name"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_keys(write(tmp_path / "keys.toml", text))
    assert told in caught.value.message
    assert ALICE not in caught.value.message


SECRETS = (
    "sk-0123456789abcdefghij",
    "hunter2hunter2hunter2",
    "hunter2",
    "sk-with spaces in it 1234",
    "ß-0123456789abcdef",
)
MALFORMED = (
    "{key} = 'alice'",
    "'{key}' = 'alice'",
    "'{key}' = 5",
    "'{key}' = ['alice']",
    "'{key}' = {{ alice = 1 }}",
    "'{key}'",
    "'{key}",
    "{key}",
    "alice = {key}",
    "alice = '{key}",
    "alice = '{key}' # '\n{key}",
    "alice: {key}",
    "alice={key}\nbob={key}",
    "alice = ['{key}']",
    "alice = '{key} '",
    "alice = ' {key}'",
    "alice = '{key}\u00e9'",
    "alice = '{key}-0123456789'\nalice = '{key}'",
    "alice = '{key}-0123456789'\nbob = '{key}-0123456789'",
    "'{key}' = 1\n'{key}' = 2",
    "['{key}']\nkey = 'alice'",
    "['{key}']\n['{key}']",
    "[alice]\n'{key}' = 'key'",
    "[alice]\nkey = '{key}-0123456789'\n'{key}' = 1",
    "[alice]\nkey = ['{key}']",
    "[alice]\nkey = {{ '{key}' = 1 }}",
    "[alice]\nsha256 = '{key}'",
    "[alice]\nkey = '{key}'\nsha256 = '{key}'",
    "[alice]\nconcurrency = '{key}'",
    "[alice]\npriority = ['{key}', 1]",
    "[[alice]]\nkey = '{key}'",
    "[alice.'{key}']\nkey = 'x'",
    "[alice\nkey = '{key}'",
    "a = '{key}-0123456789'\na.b = '{key}'",
    "\\u{key} = 1",
    'alice = "\\{key}"',
)


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("text", MALFORMED)
def test_no_malformed_file_shows_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "keys.toml"
    monkeypatch.setenv("PERILUNE_API_KEY_FILE", str(path))
    for secret in SECRETS:
        write(path, text.format(key=secret))
        assert run(["--debug", "serve", "--port", "0"]) == 2
        told = capsys.readouterr()
        assert "error: " in told.err
        assert secret not in told.err + told.out
        with pytest.raises(UsageError) as caught:
            read_keys(path)
        assert secret not in repr(caught.value) + caught.value.hint


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize("secret", ["short", "sk-with spaces in it 1234", "sk-0123456789abcdef\x7f", "sk-" + "x" * 600])
def test_the_variable_s_key_is_not_shown_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: str
) -> None:
    monkeypatch.setenv("PERILUNE_API_KEY", secret)
    assert run(["--debug", "serve", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "error: PERILUNE_API_KEY: the key is not usable" in err
    assert secret not in err


@pytest.mark.parametrize("secret", ["sk-0123456789abcdefghij", "sk-" + "x" * 600, "sk-0123.456789abcdef"])
def test_a_key_in_place_of_the_file_is_not_shown(secret: str) -> None:
    with pytest.raises(UsageError, match="the key file cannot be read") as caught:
        read_keys(Path(secret))
    assert secret not in repr(caught.value)
    assert "PERILUNE_API_KEY" in caught.value.hint


def test_a_pipe_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys.toml", 0o600)
    with pytest.raises(UsageError, match="no regular file"):
        read_keys(tmp_path / "keys.toml")


def test_a_file_that_others_read_or_that_is_no_file(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", f'alice = "{ALICE}"', 0o644)
    with pytest.raises(UsageError, match="mode 0644") as caught:
        read_keys(path)
    assert "chmod 600" in caught.value.hint
    with pytest.raises(UsageError, match=f"`{tmp_path}/absent` cannot be read"):
        read_keys(tmp_path / "absent")
    with pytest.raises(UsageError, match="no regular file"):
        read_keys(Path("/dev/null"))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [ALICE],
        [f"Basic {ALICE}"],
        [f"Bearer {ALICE}x"],
        [f"Bearer {ALICE[:-1]}"],
        [f"Bearer {ALICE}, {ALICE}"],
        [f"Bearer {ALICE}", f"Bearer {ALICE}"],
        ["Bearer \udcff"],
        ["Bearer ü"],
    ],
    ids=repr,
)
def test_what_is_no_key(headers: list[str]) -> None:
    assert KeyRing([key_of("alice", ALICE)]).find(headers) is None


def test_every_key_is_compared_whatever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("perilune.server.auth.hmac.compare_digest", compare)
    keys = [Key(f"k{i}", hashlib.sha256(f"sk-{i:016}".encode()).digest(), KeyLimits()) for i in range(5)]
    ring = KeyRing(keys)
    for header in ("Bearer sk-0000000000000000", "Bearer sk-0000000000000004", "Bearer nobody", "junk", ""):
        compared.clear()
        ring.find([header])
        assert compared == [key.digest for key in keys]


def ready(engine: Script) -> Load:
    async def load() -> Loaded:
        return engine, SamplingDefaults()

    return load


@pytest.fixture
def locked(script: ScriptFactory) -> Iterator[tuple[str, ServerState, Script]]:
    engine = script()
    engine.steps = [engine.ids("a")]
    keys = KeyRing([key_of("alice", ALICE), key_of("bob", BOB, KeyLimits(concurrency=1))])
    state = ServerState(("m",), Limits(), keys)
    with background(Running(state, bind("127.0.0.1", 0), ready(engine))) as url:
        yield url, state, engine


async def routes(state: ServerState) -> list[tuple[str, str]]:
    """Every path and method that there is."""
    found: list[Route] = []

    class Noting(Router):
        def __init__(self, routes: list[Route], **kwargs: Any) -> None:
            found.extend(routes)
            super().__init__(routes, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perilune.server.app.Router", Noting)
        await build_app(state, None).close()
    return [
        (method, route.path.replace("{name:path}", "m"))
        for route in found
        for method in route.methods or {"GET", "POST"}
    ]


def test_everything_but_health_needs_a_key(locked: tuple[str, ServerState, Script]) -> None:
    url, state, engine = locked
    paths = asyncio.run(routes(state))
    assert len(paths) > 5
    for method, path in [*paths, ("GET", "/nowhere"), ("PUT", "/v1/models"), ("POST", "/health/../v1/models")]:
        response = httpx.request(method, f"{url}{path}")
        if path in OPEN:
            assert response.status_code != 401
            continue
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == 'Bearer realm="perilune"'
        if method != "HEAD":
            assert response.json()["error"]["code"] == "invalid_api_key"
        with_key = httpx.request(method, f"{url}{path}", headers={"authorization": f"bearer {ALICE}"})
        assert with_key.status_code != 401
    assert not engine.requests


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models?x=/health",
        "http://x/health/../v1/models",
        "//v1/models",
        "/v1/../v1/models",
        "/V1/models",
        "/v1%2fmodels",
        "/v1/models;x",
        "/health/",
        "/health/x",
        "/HEALTH",
        "/health%00",
        "/ready/../v1/models",
    ],
)
@pytest.mark.parametrize("host", ["localhost", "localhost/health?x=", "a/health"])
def test_no_other_spelling_opens(locked: tuple[str, ServerState, Script], target: str, host: str) -> None:
    """vllm CVE-2026-48746: the path was taken from a URL that a Host header had a part in."""
    url, _, _ = locked
    port = httpx.URL(url).port or 0
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert int(answer.split()[1]) in (400, 401, 404, 421)


def test_unknown_and_malformed_look_the_same(locked: tuple[str, ServerState, Script]) -> None:
    url, _, _ = locked
    given = [
        None,
        "",
        "Bearer",
        "Basic abc",
        "Bearer sk-unknown-0123456789",
        f"Bearer {ALICE}x",
        "Bearer " + "x" * 9000,
    ]
    answers = {
        httpx.get(f"{url}/v1/models", headers={} if each is None else {"authorization": each}).content for each in given
    }
    assert len(answers) == 1
    assert json.loads(answers.pop())["error"]["type"] == "invalid_request_error"


def test_tenants_have_caches_of_their_own_and_rotation(locked: tuple[str, ServerState, Script]) -> None:
    url, state, engine = locked
    for secret in (ALICE, BOB):
        body = {**ASK, "cache_salt": "mine"}
        assert httpx.post(url + CHAT, json=body, headers={"authorization": f"Bearer {secret}"}).status_code == 200
    assert [request.tenant for request in engine.requests] == ["alice", "bob"]
    assert [request.cache_salt for request in engine.requests] == ["5:alice:mine", "3:bob:mine"]
    state.set_keys(KeyRing([key_of("carol", ALICE)]))
    assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {BOB}"}).status_code == 401
    assert httpx.post(url + CHAT, json=ASK, headers={"authorization": f"Bearer {ALICE}"}).status_code == 200
    assert engine.requests[-1].tenant == "carol"


async def test_concurrency_of_a_key(script: ScriptFactory) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    keys = KeyRing([key_of("alice", ALICE), key_of("bob", BOB, KeyLimits(concurrency=1))])
    state = ServerState(("m",), Limits(), keys)
    with background(Running(state, bind("127.0.0.1", 0), ready(engine), grace_s=0)) as url:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {BOB}"}, timeout=10) as client:
            async with client.stream("POST", CHAT, json={**ASK, "stream": True}) as first:
                assert first.headers["x-ratelimit-limit-concurrent"] == "1"
                assert first.headers["x-ratelimit-remaining-concurrent"] == "0"
                second = await client.post(CHAT, json=ASK)
                assert second.status_code == 429
                assert second.json()["error"]["code"] == "rate_limit_exceeded"
                assert int(second.headers["retry-after"]) >= 1
                other = await client.send(
                    client.build_request(
                        "POST", CHAT, json={**ASK, "stream": True}, headers={"authorization": f"Bearer {ALICE}"}
                    ),
                    stream=True,
                )
                assert other.status_code == 200, "another key is not held up"
                await other.aclose()
            async with asyncio.timeout(5):
                while state.in_flight:  # noqa: ASYNC110 - it changes on another thread's loop
                    await asyncio.sleep(0.01)
            async with client.stream("POST", CHAT, json={**ASK, "stream": True}) as third:
                assert third.status_code == 200
    assert os.environ.get("PERILUNE_API_KEY") is None
