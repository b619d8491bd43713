"""Cases users hit on engines of this kind, over HTTP: each ends as it should, and the engine is idle and well after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minivllm.serving.echo_model import expected_token_ids
from tests.serving.harness import BOS, ECHO, Server, events, eventually, expected_text

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def leaves_the_server_idle(echo: Server) -> Iterator[None]:
    yield
    echo.wait_until_idle()
    assert echo.get("/health").status_code == 200


def completion(server: Server, prompt: Any = PROMPT, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields})


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_case_12_a_request_id_that_is_open_is_refused_and_free_again_after_an_abort(slow_echo: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "request_id": "mine"}
    with slow_echo.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            seen = events(stream)
            next(seen)
            error = refusal(completion(slow_echo, request_id="mine"))
            assert "request_id 'cmpl-mine' is in use" in error["message"] and error["param"] == "request_id"
        eventually(lambda: not slow_echo.stats()["requests"])
        again = client.post("/v1/completions", json={**body, "max_tokens": 3, "stream": False})
        assert text(again) == expected_text(PROMPT, 3)
        assert again.json()["id"] == "cmpl-mine"
    slow_echo.wait_until_idle()


def test_case_13_a_stream_that_is_not_read_stalls_nobody_and_loses_nothing(echo: Server) -> None:
    """The unread one is so long that its pieces fill every buffer on the way."""
    body = {"prompt": PROMPT, "max_tokens": 480, "logprobs": 20, "stream": True}
    with echo.client() as client, client.stream("POST", "/v1/completions", json=body) as unread:
        for _ in range(3):
            assert text(completion(echo, "A dog", max_tokens=20)) == expected_text("A dog", 20)
        eventually(lambda: not echo.stats()["requests"])  # it runs to its end meanwhile
        assert "".join(chunk["choices"][0]["text"] for chunk in events(unread)) == expected_text(PROMPT, 480)


def test_case_13_streams_at_once_get_their_own_tokens(echo: Server) -> None:
    found: dict[int, list[int]] = {}

    def read(i: int) -> None:
        body = {"prompt": f"stream {i}", "max_tokens": 40, "stream": True, "return_token_ids": True}
        with echo.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            found[i] = [t for chunk in events(stream) for t in chunk["choices"][0]["token_ids"]]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: expected_token_ids(ECHO.encode(f"stream {i}"), 40) for i in range(12)}


@pytest.mark.parametrize("prompt", ["", [], [[]], ["fine", ""]], ids=str)
def test_case_14_an_empty_prompt_is_refused(echo: Server, prompt: Any) -> None:
    error = refusal(completion(echo, prompt))
    assert "The prompt is empty" in error["message"] and error["param"] == "prompt"
    assert text(completion(echo)) == expected_text(PROMPT, 8)


def test_case_15_a_prompt_may_have_one_token_less_than_max_model_len(echo: Server) -> None:
    assert len(completion(echo, [7] * 511, return_token_ids=True).json()["choices"][0]["token_ids"]) == 1
    for length in (512, 513):
        error = refusal(completion(echo, [7] * length))
        assert f"has {length} tokens" in error["message"] and "at most 511" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logit_bias": {str(ECHO.vocab_size + 5): 1}}, "logit_bias", f"ids go from 0 to {ECHO.vocab_size - 1}"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        ({"prompt": [5, -3]}, "prompt", "-3"),
        ({"prompt": [5, 10**6]}, "prompt", "1000000"),
        ({"prompt": [5, 10**30]}, "prompt", ""),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "1000000"),
    ],
    ids=str,
)
def test_case_16_a_token_id_outside_the_vocabulary_is_refused_for_that_request_only(
    echo: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    results: list[httpx.Response] = []
    neighbour = threading.Thread(target=lambda: results.append(completion(echo, max_tokens=60)))
    neighbour.start()
    error = refusal(completion(echo, **fields))
    neighbour.join()
    assert error["param"] == param and words in error["message"]
    assert text(results[0]) == expected_text(PROMPT, 60)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("n", 0),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_tokens", 9),
        ("stop", [""]),
        ("logprobs", 99),
        ("presence_penalty", 3),
        ("seed", 2**70),
        ("max_tokens", "many"),
        ("stream", "perhaps"),
        ("truncate_prompt_tokens", 0),
    ],
)
def test_case_17_a_bad_value_is_refused_with_its_field(echo: Server, field: str, value: Any) -> None:
    error = refusal(completion(echo, **{field: value}))
    assert error["param"] == field and field in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_case_23_a_stop_string_across_tokens_ends_the_text_before_it(echo: Server, stream: bool) -> None:
    whole = expected_text(PROMPT, 60)
    stop = whole[20:26]
    assert len(stop) == 6 and whole.index(stop) == 20
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": stop, "stream": stream}
    with echo.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response)]
        else:
            response.read()
            choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == whole[:20]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_case_24_characters_split_over_tokens_are_streamed_whole(tiny: Server) -> None:
    """Random draws of an emoji's four bytes: whole ones, and runs of bytes that are no text."""
    allowed = ECHO.encode("😀")
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 1, "seed": 2, "allowed_token_ids": allowed, "stream": True}
    with tiny.client() as client, client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as response:
        choices = [chunk["choices"][0] for chunk in events(response)]
    data = b"".join(ECHO.token_bytes(t) for choice in choices for t in choice["token_ids"])
    assert len(data) == 100
    assert "".join(choice["text"] for choice in choices) == data.decode("utf-8", errors="replace")
    held = [0]  # bytes since the last text: an unfinished character is three at most
    for choice in choices:
        held.append(0 if choice["text"] else held[-1] + len(choice["token_ids"]))
    assert max(held) <= 3


def test_case_25_a_template_that_writes_bos_gives_one(tiny: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    chat = tiny.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert chat.count(BOS) == 1 and chat[0] == BOS
    answer = tiny.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == chat
    assert tiny.post("/tokenize", {"prompt": "<|bos|>Hello"}).json()["tokens"].count(BOS) == 1
