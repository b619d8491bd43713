"""Whatever a client sends is answered, or refused with a 4xx that says what is wrong; the server is idle and well after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.harness import ECHO, Server, expected_text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REFUSALS = (400, 404, 405, 413, 429)
QUIET = settings(suppress_health_check=list(HealthCheck))

integers = st.sampled_from([0, 1, -1, 2, 20, 21, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400])
numbers = st.sampled_from([0.0, -0.0, 1.0, 0.5, 1e-320, 1e-8, 1e308, -1e308, float("nan"), float("inf"), -2.0])
texts = st.sampled_from(
    ["", " ", "a", "\x00", "\ud800", "\udfff\ud800", "\n", "é" * 3, "x" * 3000, "<|end|>", "{{ x }}", "../.."]
)
odd = st.none() | st.booleans() | integers | numbers | texts
nested = st.recursive(
    odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("1"), inner, max_size=3), max_leaves=6
)
FIELDS = [
    "model", "stream", "stream_options", "user", "request_id", "priority", "cache_salt", "return_token_ids", "n", "temperature",
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens",
    "prompt_logprobs", "skip_special_tokens", "truncate_prompt_tokens", "echo", "logprobs", "best_of", "suffix", "tools",
    "top_logprobs", "max_completion_tokens", "add_generation_prompt", "chat_template", "chat_template_kwargs",
]  # fmt: skip
prompts = st.just("hi") | nested | st.lists(integers, max_size=4) | st.lists(texts, max_size=3)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]) | odd, "content": st.just("hi") | nested},
        optional={"tool_calls": nested, "name": nested},
    )
    | odd,
    max_size=3,
)


@pytest.fixture(scope="module")
def client(echo: Server) -> Iterator[httpx.Client]:
    with echo.client() as client:
        yield client
    assert echo.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 5, "temperature": 0}).json()["choices"][0]["text"] == (
        expected_text("hi", 5)
    )
    echo.wait_until_idle()


def check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    assert response.status_code in REFUSALS, f"{response.status_code}: {response.text}"
    assert response.json()["error"]["message"]


def post(client: httpx.Client, path: str, body: Any) -> None:
    check(client.post(path, content=json.dumps(body), headers={"content-type": "application/json"}))


@QUIET
@given(prompt=prompts, fields=st.dictionaries(st.sampled_from(FIELDS), nested, max_size=3))
def test_any_completion_is_answered_or_refused(client: httpx.Client, prompt: Any, fields: dict[str, Any]) -> None:
    post(client, COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "stream": False, **fields})


@QUIET
@given(messages=messages, fields=st.dictionaries(st.sampled_from(FIELDS), nested, max_size=3))
def test_any_chat_is_answered_or_refused(client: httpx.Client, messages: Any, fields: dict[str, Any]) -> None:
    post(client, CHAT, {"messages": messages, "max_tokens": 3, **fields})
    post(client, "/tokenize", {"messages": messages})


@QUIET
@given(prompt=prompts, tokens=st.lists(odd, max_size=4) | nested, more=st.dictionaries(texts, nested, max_size=1))
def test_any_text_and_any_tokens_are_translated_or_refused(
    client: httpx.Client, prompt: Any, tokens: Any, more: dict[str, Any]
) -> None:
    post(client, "/tokenize", {"prompt": prompt, "return_token_strs": True, **more})
    post(client, "/detokenize", {"tokens": tokens, **more})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, path: str) -> None:
    bodies = [
        b"",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"a":' * 50_000,
        b"\x00" * 100,
        b"9" * 6000,
    ]
    for body in bodies:
        response = client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, f"{body[:20]!r}: {response.status_code}"
        check(response)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 10**30),
        ("top_k", 10**30),
        ("min_tokens", 10**30),
        ("seed", 2**63),
        ("repetition_penalty", 1e-308),
        ("request_id", "\ud800"),
        ("cache_salt", "\ud800"),
        ("stop", "\ud800"),
    ],
)
def test_a_value_that_no_other_process_could_be_sent_is_refused_with_its_field(
    client: httpx.Client, field: str, value: Any
) -> None:
    body = json.dumps({"prompt": "hi", **({"max_tokens": 10**30} if field == "min_tokens" else {}), field: value})
    for _ in range(2):  # nothing is left of the first
        response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] in (field, "max_tokens")


def test_the_seed_of_the_last_completion_fits_too(client: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "temperature": 1, "n": 2, "seed": 2**63 - 1}
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 400 and "with n=2" in response.json()["error"]["message"]
    assert client.post(COMPLETIONS, json={**body, "seed": 2**63 - 2}).status_code == 200


def test_a_template_in_a_request_is_a_stranger_s_program_and_is_not_run(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    response = client.post(CHAT, json={**body, "chat_template": "{{ 7 * 6 }}"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    assert client.post(CHAT, json={**body, "chat_template": next(iter(ECHO.chat_templates))}).status_code == 200


def test_the_openapi_page_says_what_each_answer_is(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    content = {path: list(paths[path]["get"]["responses"]["200"].get("content", {})) for path in ("/health", "/metrics", "/")}
    assert content == {"/health": [], "/metrics": ["text/plain"], "/": ["text/html"]}
