"""GuideLLM, unchanged, against ``perilune serve``: its own requests, its own reading of our streams and usage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import Program, RunClient

from perilune.cli.start import bundled_model

pytestmark = pytest.mark.slow

REQUESTS, STREAMS, PROMPT, ANSWER = 12, 4, 60, 16


@pytest.fixture
def tokenizer(program: Program, run_client: RunClient, tmp_path: Path) -> Path:
    """The bundled model's vocabulary in the form that GuideLLM reads."""
    python = program("guidellm", "python")
    run_client(python, Path(__file__).with_name("hf_tokenizer.py"), bundled_model(), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_a_benchmark_runs(
    endpoint: str,
    program: Program,
    run_client: RunClient,
    server_url: str,
    tokenizer: Path,
    tmp_path: Path,
    completed: Callable[[], float],
) -> None:
    out = tmp_path / "out.json"
    backend = f"kind=openai_http,target={server_url},model=pico,request_format={endpoint}"
    run_client(
        *(program("guidellm", "guidellm"), "run", "--backend", backend),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"),
        *("--output", f"kind=json,path={out}", "--disable-progress"),
    )
    report = json.loads(out.read_text())
    requests: dict[str, list[dict[str, Any]]] = report["benchmarks"][0]["requests"]
    assert len(requests["successful"]) >= REQUESTS
    assert requests["errored"] == []
    assert completed() >= REQUESTS
    for request in requests["successful"]:
        assert 0 < request["output_tokens"] <= ANSWER
        assert request["time_to_first_token_ms"] > 0
