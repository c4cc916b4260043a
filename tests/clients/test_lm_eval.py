"""lm-evaluation-harness, unchanged, against ``perilune serve``: generation and log-likelihood over ``/v1/completions``.

The right answers are the server's own: what it says, greedily, to the same prompt. So a score of 1 means that
prompts, stop strings, lengths and log-probabilities of the two agree; how good the model is doesn't matter. Prompts are
tokenised by the server (``/tokenizer_info``, ``/tokenize``): lm-eval finds that out by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.clients.conftest import Program, RunClient

pytestmark = pytest.mark.slow

QUESTIONS = [f"{a}+{b}=" for a, b in ((2, 3), (12, 30), (7, 9), (45, 54), (1, 1), (20, 22), (5, 8), (64, 36))]
GENERATION = """
task: sums_generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["{stop}"], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """
task: sums_chosen
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 1
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GSM8K = """
task: gsm8k_local
dataset_path: json
dataset_kwargs: {{data_files: {{train: "{data}/train.jsonl", test: "{data}/test.jsonl"}}}}
fewshot_split: train
test_split: test
num_fewshot: 2
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:", "</s>", "<|im_end|>"], do_sample: false, temperature: 0, max_gen_toks: 32}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [",", "\\\\$"]}}
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}}, {{function: take_first}}]
"""


def complete(url: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/v1/completions", json={"model": "pico", "temperature": 0, **body}, timeout=120)
    response.raise_for_status()
    return response.json()["choices"][0]


def evaluate(run: RunClient, lm_eval: Path, url: str, task: str, folder: Path) -> dict[str, Any]:
    """Runs one task; its results and samples."""
    arguments = f"model=pico,base_url={url}/v1/completions,num_concurrent=4,max_retries=1,max_length=4096"
    run(
        *(lm_eval, "run", "--model", "local-completions", "--model_args", arguments, "--tasks", task),
        *("--include_path", folder, "--output_path", folder / "out", "--log_samples", "--limit", "8"),
    )
    results = next((folder / "out").rglob("results_*.json"))
    samples = next((folder / "out").rglob(f"samples_{task}_*.jsonl"))
    scores: dict[str, Any] = json.loads(results.read_text())["results"][task]
    return scores | {"samples": [json.loads(line) for line in samples.read_text().splitlines()]}


def write(folder: Path, task: str, rows: list[dict[str, Any]], **values: str) -> None:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(task.format(data=data, **values))


@pytest.fixture
def lm_eval(program: Program) -> Path:
    return program("lm-eval", "lm_eval")


def test_generation_equals_what_the_server_says(
    lm_eval: Path, run_client: RunClient, server_url: str, tmp_path: Path, completed: Callable[[], float]
) -> None:
    stop = "."
    answers = {q: complete(server_url, prompt=q, max_tokens=12, stop=[stop])["text"] for q in QUESTIONS}
    assert len(set(answers.values())) > 2, answers
    before = completed()
    write(tmp_path, GENERATION, [{"question": q, "answer": a} for q, a in answers.items()], stop=stop)
    scores = evaluate(run_client, lm_eval, server_url, "sums_generated", tmp_path)
    assert [sample["resps"][0][0] for sample in scores["samples"]] == list(answers.values())
    assert scores["exact_match,none"] == 1.0
    assert completed() - before == len(QUESTIONS)


def test_loglikelihood_prefers_what_the_server_says(
    lm_eval: Path, run_client: RunClient, server_url: str, tmp_path: Path
) -> None:
    rows = []
    for question in QUESTIONS:
        said = complete(server_url, prompt=question, max_tokens=1, logprobs=1)
        token = said["logprobs"]["tokens"][0]
        rows.append({"question": question, "choices": ["zebra", token or "\n", " qu"], "best": said})
    write(tmp_path, CHOICE, [{"question": row["question"], "choices": row["choices"]} for row in rows])
    scores = evaluate(run_client, lm_eval, server_url, "sums_chosen", tmp_path)
    assert scores["acc,none"] == 1.0
    for sample, row in zip(scores["samples"], rows, strict=True):
        loglikelihood, greedy = sample["resps"][1][0]
        assert float(loglikelihood) == pytest.approx(row["best"]["logprobs"]["token_logprobs"][0], abs=1e-3)
        assert str(greedy) == "True"


def test_gsm8k_runs(lm_eval: Path, run_client: RunClient, server_url: str, tmp_path: Path, shared: Path) -> None:
    """The bundled model knows sums, not GSM8K: what counts is that every question is asked, with its two shots."""
    (tmp_path / "task.yaml").write_text(GSM8K.format(data=shared / "data" / "gsm8k"))
    scores = evaluate(run_client, lm_eval, server_url, "gsm8k_local", tmp_path)
    assert 0.0 <= scores["exact_match,strict-match"] <= 1.0
    assert len(scores["samples"]) == 8
    for sample in scores["samples"]:
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        assert prompt.count("Question: ") == 3
        assert "####" in prompt
