"""``perilune chat`` against canned servers, good and bad, and with the bundled model."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from perilune.cli.chat import MAX_ROUNDS, Conversation, Thinking, ToolName, View
from perilune.cli.client import ChatClient
from perilune.errors import PeerError

if TYPE_CHECKING:
    from tests.cli.conftest import Run

MODELS = json.dumps({"object": "list", "data": [{"id": "canned"}]}).encode()


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
SILENCE = b"(nothing, for long)"
ANSWER = (
    chunk({"role": "assistant", "reasoning_content": "thin"})
    + chunk({"reasoning_content": "king"})
    + chunk({"content": "4"})
    + chunk({"content": "2"}, "stop")
    + b'data: {"choices": [], "usage": {}}\n\n'
    + DONE
)


def call(arguments: str, name: str = "calculator") -> bytes:
    first = {
        "index": 0,
        "id": "functions.calculator:0",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
    half = len(arguments) // 2
    return (
        chunk({"tool_calls": [first]})
        + chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments[:half]}}]})
        + chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments[half:]}}]}, "tool_calls")
        + DONE
    )


class Peer:
    """A server that answers chat requests with the given bodies, in turn, the last one for ever."""

    def __init__(self, bodies: list[bytes], status: int = 200, models: bytes = MODELS) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.over = threading.Event()
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, models)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                peer.requests.append(json.loads(self.rfile.read(length)))
                if bodies[0] == SILENCE and len(peer.requests) == 1:
                    peer.over.wait(20)
                self._answer(status, bodies[min(len(peer.requests), len(bodies)) - 1])

            def _answer(self, code: int, body: bytes) -> None:
                peer.keys.append(self.headers["authorization"])
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


PeerFactory = Callable[..., Peer]


@pytest.fixture
def peer() -> Iterator[PeerFactory]:
    peers: list[Peer] = []

    def start(*bodies: bytes, **kwargs: Any) -> Peer:
        peers.append(Peer(list(bodies), **kwargs))
        return peers[-1]

    yield start
    for each in peers:
        each.close()


def test_sampling_options_go_to_the_server(run: Run, peer: PeerFactory) -> None:
    server = peer(ANSWER)
    assert run("chat", "--url", server.url, "--temperature", "0", "--seed", "7", stdin="x").returncode == 0
    assert (server.requests[0]["temperature"], server.requests[0]["seed"]) == (0, 7)


@contextmanager
def talking(url: str, tools: tuple[ToolName, ...] = (), system: str | None = None) -> Iterator[Conversation]:
    client = ChatClient(url)
    try:
        yield Conversation(client, View(Thinking.SHOW), tools, system)
    finally:
        client.close()


def test_a_question_from_a_pipe(run: Run, peer: PeerFactory) -> None:
    server = peer(ANSWER)
    done = run("chat", "--url", server.url + "/v1/", stdin=" what?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")
    assert server.requests == [{"model": "canned", "messages": [{"role": "user", "content": "what?"}], "stream": True}]


@pytest.mark.parametrize(
    ("thinking", "shown"), [("show", "thinking\n"), ("hide", ""), ("fold", "(thought for "), ("auto", "")]
)
def test_thinking(peer: PeerFactory, capsys: pytest.CaptureFixture[str], thinking: str, shown: str) -> None:
    client = ChatClient(peer(ANSWER).url)
    Conversation(client, View(Thinking(thinking)), (), None).ask("what?")
    client.close()
    out, err = capsys.readouterr()
    assert out == "42\n"
    assert err.startswith(shown)
    assert bool(err) == bool(shown)


@pytest.mark.parametrize(
    ("stdin", "message"), [(b"", "stdin is empty"), (b" \n", "stdin is empty"), (b"ab\xff", "not UTF-8: byte 2")]
)
def test_nothing_to_ask(run: Run, peer: PeerFactory, stdin: bytes, message: str) -> None:
    server = peer(ANSWER)
    done = run("chat", "--url", server.url, stdin=stdin)
    assert done.returncode == 2
    assert message in done.stderr
    assert server.requests == []


def test_the_key_of_the_environment_goes_to_the_server(
    run: Run, peer: PeerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = peer(ANSWER)
    monkeypatch.setenv("PERILUNE_API_KEY", "sk-canary-0123456789")
    assert run("chat", "--url", server.url, stdin="x").returncode == 0
    assert server.keys == ["Bearer sk-canary-0123456789"] * 2
    refusing = peer(b'{"error": {"message": "no key"}}', status=401)
    refused = run("chat", "--url", refusing.url, stdin="x")
    assert "answered 401: no key" in refused.stderr
    assert "PERILUNE_API_KEY holds the key" in refused.stderr
    assert "canary" not in refused.stderr
    monkeypatch.setenv("PERILUNE_API_KEY", "canary\nx: y")
    refused = run("chat", "--url", server.url, stdin="x")
    assert (refused.returncode, "no header can carry" in refused.stderr, "canary" in refused.stderr) == (2, True, False)


def test_a_terminal_is_not_told_what_to_do(run: Run, peer: PeerFactory) -> None:
    text = "a\x1b]0;x\x07b\u202ec\u200d\r"
    answer = chunk({"content": text}, "stop") + DONE
    terminal = Typing(peer(answer).url)
    try:
        terminal.see("> ")
        terminal.type("x\r")
        terminal.see("a\\x1b]0;x\\x07b\\x202ec\u200d\\x0d")
        terminal.type("/exit\r")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()
    assert run("chat", "--url", peer(answer).url, stdin="x").stdout == text + "\n", "a pipe gets every byte"


class Typing:
    """``perilune chat`` on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "perilune.cli.main", "chat", "--url", url]
        # A suite that runs in the background ignores SIGINT, and its children would too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
            )
        finally:
            signal.signal(signal.SIGINT, before)
        os.close(slave)
        self.seen = ""
        self._looked = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def see(self, text: str) -> None:
        """Reads until ``text`` is on the screen, behind what was seen before."""
        deadline = time.monotonic() + 20
        while (found := self.seen.find(text, self._looked)) < 0:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 4096).decode()
        self._looked = found + len(text)

    def close(self) -> int:
        code = self.process.wait(10)
        os.close(self._master)
        return code


def test_a_conversation_on_a_terminal(peer: PeerFactory) -> None:
    """Ctrl-C stops an answer, /new forgets, /exit ends."""
    server = peer(SILENCE, ANSWER)
    terminal = Typing(server.url)
    try:
        terminal.see("> ")
        terminal.type("first\r")
        while not server.requests:
            time.sleep(0.01)
        terminal.process.send_signal(signal.SIGINT)
        terminal.see("> ")
        terminal.type("second\r")
        terminal.see("thinking")
        terminal.see("42")
        terminal.type("third\r")
        terminal.see("42")
        terminal.type("/new\r")
        terminal.type("fourth\r")
        terminal.see("42")
        terminal.type("/exit\r")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()
    asked = [[message["content"] for message in request["messages"]] for request in server.requests]
    assert asked == [["first"], ["second"], ["second", "42", "third"], ["fourth"]]


def test_a_tool_is_run_and_the_chain_goes_on(peer: PeerFactory, capsys: pytest.CaptureFixture[str]) -> None:
    server = peer(chunk({"reasoning_content": "hm"}) + call('{"expression": "12*12"}'), ANSWER)
    with talking(server.url, (ToolName.CALCULATOR,), "Be brief.") as talk:
        talk.ask("12*12?")
    first, second = server.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculator"]
    assert second["messages"][:2] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12*12?"}]
    assert second["messages"][2:] == [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "functions.calculator:0",
                    "type": "function",
                    "function": {"name": "calculator", "arguments": '{"expression": "12*12"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "functions.calculator:0", "name": "calculator", "content": "144"},
    ]
    out, err = capsys.readouterr()
    assert out == "42\n"
    assert '┌ calculator {"expression": "12*12"}\n└ 144\n' in err


def test_a_tool_that_is_not_there(peer: PeerFactory) -> None:
    server = peer(call("{}", "rm"), ANSWER)
    with talking(server.url, (ToolName.CALCULATOR,)) as talk:
        talk.ask("x")
    assert server.requests[1]["messages"][-1]["content"] == "error: there is no tool 'rm'"


def test_a_model_that_calls_for_ever_is_stopped(peer: PeerFactory) -> None:
    server = peer(call('{"expression": "1"}'))
    with talking(server.url, (ToolName.CALCULATOR,)) as talk:
        with pytest.raises(PeerError, match=f"after {MAX_ROUNDS} rounds"):
            talk.ask("x")
        assert len(server.requests) == MAX_ROUNDS
        talk.forget()


def test_a_failed_question_is_forgotten(peer: PeerFactory) -> None:
    server = peer(b"data: {}\n\n", ANSWER, ANSWER)
    with talking(server.url) as talk:
        with pytest.raises(PeerError, match="broke off"):
            talk.ask("first")
        talk.ask("second")
        talk.ask("third")
    assert [message["content"] for message in server.requests[2]["messages"]] == ["second", "42", "third"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ended before it was done"),
        (chunk({"content": "a"}), "ended before it was done"),
        (chunk({"content": "a"}) + b'data: {"error": {"message": "out of luck"}}\n\n', "out of luck"),
        (b"data: {nonsense\n\n", "not what its API says"),
        (b"data: []\n\n", "not what its API says"),
        (chunk({"content": 5}), "not what its API says"),
        (chunk({"tool_calls": [{"index": 7}]}), "tool call 7 after 0 calls"),
        (chunk({"tool_calls": [{"index": -1}]}), "tool call -1"),
    ],
)
def test_peers_that_answer_nonsense(peer: PeerFactory, body: bytes, message: str) -> None:
    with talking(peer(body).url) as talk, pytest.raises(PeerError, match=message):
        talk.ask("x")


def test_a_refusal_is_shown(peer: PeerFactory) -> None:
    server = peer(b'{"error": {"message": "too long"}}', status=400)
    with talking(server.url) as talk, pytest.raises(PeerError, match="answered 400: too long"):
        talk.ask("x")


@pytest.mark.parametrize("models", [b"", b"[]", b'{"data": []}', b'{"data": [{"id": 5}]}'])
def test_servers_without_a_model(peer: PeerFactory, models: bytes) -> None:
    with pytest.raises(PeerError):
        ChatClient(peer(b"", models=models).url)


def test_markup_in_an_answer_is_text(peer: PeerFactory, capsys: pytest.CaptureFixture[str]) -> None:
    with talking(peer(chunk({"content": "[bold]x[/] :smile:"}) + DONE).url) as talk:
        talk.ask("x")
    assert capsys.readouterr().out == "[bold]x[/] :smile:\n"


def test_the_bundled_model_answers_a_sum(run: Run) -> None:
    done = run("chat", "--thinking", "show", "--temperature", "0", stdin="What is 12+30?")
    assert done.returncode == 0
    assert "42" in done.stdout
    assert done.stderr, "it thinks first"


def test_the_bundled_model_uses_the_calculator(run: Run) -> None:
    done = run("chat", "--tools", "calculator", "--temperature", "0", stdin="What is 345*27?")
    assert done.returncode == 0
    assert "┌ calculator " in done.stderr
    assert "└ 9315" in done.stderr
    assert "9315" in done.stdout


def test_a_server_that_never_answers(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = run("chat", "--url", url, stdin="hi")
    assert done.returncode == 6
    assert "error:" in done.stderr
