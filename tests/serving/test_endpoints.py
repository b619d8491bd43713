"""The endpoints beside the two that generate, and what guards them all."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from minivllm import __version__
from tests.serving.harness import ECHO, Server, events, expected_text, metric, serving


def test_tokenize_and_detokenize_are_inverse(echo: Server) -> None:
    found = echo.post("/tokenize", {"prompt": "naïve 😀", "return_token_strs": True}).json()
    assert found["tokens"] == ECHO.encode("naïve 😀")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert len(found["token_strs"]) == found["count"]
    assert echo.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "naïve 😀"}


@pytest.mark.parametrize("tokens", [[-1], [10**6]])
def test_detokenize_refuses_what_is_no_token(echo: Server, tokens: list[int]) -> None:
    answer = echo.post("/detokenize", {"tokens": tokens})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"


def test_version_models_and_health(echo: Server) -> None:
    assert echo.get("/version").json() == {"version": __version__}
    assert echo.get("/health").status_code == 200
    assert echo.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert echo.get("/v1/models/nobody").status_code == 404


def test_a_model_answers_to_all_its_names(tiny: Server) -> None:
    for name in ("tiny", "other-name"):
        answer = tiny.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200 and answer.json()["model"] == "tiny"


def test_the_page_needs_nothing_from_elsewhere(echo: Server) -> None:
    page = echo.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>minivllm</title>" in page.text
    assert "http://" not in page.text and "https://" not in page.text


def test_metrics_have_vllms_names_and_count(echo: Server) -> None:
    before = {name: metric(echo, name) for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")}
    echo.post("/v1/completions", {"prompt": "count me", "max_tokens": 7})
    assert metric(echo, "vllm:generation_tokens_total") == before["vllm:generation_tokens_total"] + 7
    assert metric(echo, "vllm:prompt_tokens_total") == before["vllm:prompt_tokens_total"] + 8
    text = echo.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total", "request_success_total", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket", "cache_config_info",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in text, name


def test_the_prefix_cache_shows_in_usage_and_metrics(echo: Server) -> None:
    prompt = "a prompt of several blocks, sent twice"
    hits = metric(echo, "vllm:prefix_cache_hits_total")
    cached = [
        echo.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert [found["cached_tokens"] for found in cached] == [0, 36]
    assert metric(echo, "vllm:prefix_cache_hits_total") == hits + 36


def test_cache_salt_keeps_tenants_apart(echo: Server) -> None:
    prompt = "salted, and long enough to be cached"
    for salt in ("one", "two"):
        answer = echo.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_salt": salt})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not JSON"), ("[]", "dict"), ('{"max_tokens": 1}', "prompt"), ('{"prompt": {"a": 1}}', "prompt")],
)
def test_a_malformed_body_is_a_400_that_says_what_is_wrong(echo: Server, content: str, words: str) -> None:
    with echo.client() as client:
        answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_an_unknown_path_and_method_are_refused_in_the_same_shape(echo: Server) -> None:
    assert echo.get("/v1/embeddings").status_code == 404
    assert echo.get("/v1/completions").status_code == 405
    assert "There is no GET /v1/embeddings here" in echo.get("/v1/embeddings").json()["error"]["message"]


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]], ids=str
)
def test_a_malformed_conversation_is_refused(echo: Server, messages: Any) -> None:
    answer = echo.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400 and "messages" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- guards


@pytest.fixture(scope="module")
def guarded() -> Any:
    flags = ("--api-key", "secret", "--api-key", "other", "--max-open-requests", "4", "--max-request-bytes", "10000")
    with serving("echo:20", *flags) as server:
        yield server


KEY = {"Authorization": "Bearer secret"}


def test_without_the_key_only_the_public_paths_answer(guarded: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secrets"}):
        answer = guarded.post("/v1/completions", body, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.post("/tokenize", {"prompt": "x"}).status_code == 401
    assert guarded.get("/stats").status_code == 401
    for path in ("/health", "/metrics", "/version", "/"):
        assert guarded.get(path).status_code == 200
    for key in ("secret", "other"):
        assert guarded.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_too_many_open_requests_are_429_with_retry_after_and_the_open_ones_go_on(guarded: Server) -> None:
    body = {"prompt": "x", "max_tokens": 20, "n": 2}
    answers: list[int] = []
    with guarded.client(headers=KEY) as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as one:
        seen = events(one)
        next(seen)
        second = threading.Thread(target=lambda: answers.append(guarded.post("/v1/completions", body, headers=KEY).status_code))
        second.start()
        refused = guarded.post("/v1/completions", {**body, "n": 4}, headers=KEY)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        text = "".join(choice["text"] for chunk in seen for choice in chunk["choices"] if choice["index"] == 0)
        second.join()
    assert answers == [200]
    assert expected_text("x", 20).endswith(text)
    assert guarded.post("/v1/completions", {**body, "n": 4}, headers=KEY).status_code == 200  # the room is free again
    assert guarded.post("/v1/completions", {**body, "n": 5}, headers=KEY).status_code == 400  # it could never be


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_413(guarded: Server, chunked: bool) -> None:
    content = b'{"prompt": "' + b"x" * 20_000 + b'"}'
    sent: Any = iter([content[:5000], content[5000:]]) if chunked else content
    with guarded.client(headers=KEY) as client:
        answer = client.post("/v1/completions", content=sent, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and "--max-request-bytes" in answer.json()["error"]["message"]
