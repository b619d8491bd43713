"""The `openai` client, unmodified: what it asks is answered, and with the tokens the offline API gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from minivllm import LLM, SamplingParams
from tests.serving.harness import ECHO, TINY_SETTINGS, Server, expected_text

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Say something."}]
CHAT_PROMPT = "user: Say something.\nassistant: "


@pytest.fixture(scope="module")
def client(echo: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(echo: Server) -> str:
    return "echo:2"


# ---------------------------------------------------------------- text


def test_a_completion_is_the_models(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.choices[0].text == expected_text(PROMPT, 8)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (24, 8, 32)


def test_a_chat_is_the_completion_of_its_rendered_template(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=8, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected_text(CHAT_PROMPT, 8)


def test_a_streamed_completion_adds_up_and_ends_with_its_usage(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(model=model, prompt=PROMPT, max_tokens=9, temperature=0, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected_text(PROMPT, 9)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9


def test_a_streamed_chat_begins_with_the_role(client: openai.OpenAI, model: str) -> None:
    chunks = list(client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=5, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_text(CHAT_PROMPT, 5)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_prompts_come_as_text_token_ids_and_lists_of_either(client: openai.OpenAI, model: str) -> None:
    other = "A dog"
    expected = [expected_text(PROMPT, 4), expected_text(other, 4)]
    for prompts in ([PROMPT, other], [ECHO.encode(PROMPT), ECHO.encode(other)]):
        answer = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    answer = client.completions.create(model=model, prompt=ECHO.encode(PROMPT), max_tokens=4, temperature=0)
    assert answer.choices[0].text == expected[0]


def test_several_prompts_with_n_stream_each_under_its_index(client: openai.OpenAI, model: str) -> None:
    texts = [""] * 4
    prompts = [PROMPT, "A dog"]
    for chunk in client.completions.create(model=model, prompt=prompts, n=2, max_tokens=6, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [expected_text(prompt, 6) for prompt in prompts for _ in range(2)]  # the echo model has no noise


def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=2, temperature=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == PROMPT + expected_text(PROMPT, 2)
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset == list(range(26))  # a byte a token


def test_logprobs_of_a_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    rows = answer.choices[0].logprobs.content or []
    assert "".join(row.token for row in rows) == answer.choices[0].message.content
    assert [[round(math.exp(top.logprob), 3) for top in row.top_logprobs] for row in rows] == [[0.5, 0.25]] * 3
    assert all(bytes(row.bytes or []).decode() == row.token for row in rows)


def test_token_ids_come_where_asked_for(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=3, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0].model_dump()
    assert ECHO.decode(choice["token_ids"]) == choice["text"]
    assert choice["prompt_token_ids"] == ECHO.encode(PROMPT)


def test_models_are_listed_and_found(client: openai.OpenAI, model: str) -> None:
    (listed,) = client.models.list().data
    assert listed.id == model
    assert client.models.retrieve(model).id == model


# ---------------------------------------------------------------- errors


def test_a_bad_value_is_a_400_that_names_its_field(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be") as refused:
        client.completions.create(model=model, prompt=PROMPT, temperature=-1)
    assert refused.value.param == "temperature"


def test_a_model_that_is_not_served_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; there is: echo:2") as refused:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert refused.value.code == "model_not_found"


def test_a_stream_that_is_refused_is_a_status_not_an_event(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model=model, prompt="x" * 600, stream=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "alloy"}),
        ("reasoning_effort", "high"),
        ("no_such_field", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, model: str, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=f"does not support .*{field}") as refused:
        client.chat.completions.create(model=model, messages=MESSAGES, extra_body={field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    "extra", [{"tools": []}, {"response_format": {"type": "text"}}, {"user": "me"}, {"tool_choice": "none"}, {"foo": None}]
)
def test_what_asks_for_nothing_is_taken(client: openai.OpenAI, model: str, extra: dict[str, Any]) -> None:
    assert client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=1, extra_body=extra)


# ---------------------------------------------------------------- a real model, in small


@pytest.fixture(scope="module")
def both(tiny: Server, tiny_folder: Path) -> Iterator[tuple[openai.OpenAI, LLM]]:
    """The same model, served and offline."""
    with LLM(tiny_folder, **TINY_SETTINGS) as llm:  # type: ignore[arg-type]
        yield openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0), llm


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 2},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.3, "top_k": 5},
        {"temperature": 0, "logit_bias": {"40": 20, "41": -100}},
        {"temperature": 1, "seed": 1, "allowed_token_ids": [33, 34, 35, 36]},
        {"temperature": 1, "seed": 1, "min_p": 0.2, "bad_words": ["e", "th"]},
        {"temperature": 1, "seed": 3, "truncate_prompt_tokens": 5},
    ],
    ids=str,
)
def test_answers_equal_the_offline_apis(both: tuple[openai.OpenAI, LLM], extra: dict[str, Any]) -> None:
    client, llm = both
    params = SamplingParams(max_tokens=12, ignore_eos=True, **extra)
    offline = llm.generate(PROMPT, params, use_tqdm=False)[0]
    body = {**extra, "ignore_eos": True, "return_token_ids": True}
    online = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, extra_body=body)
    assert [choice.model_dump()["token_ids"] for choice in online.choices] == [one.token_ids for one in offline.outputs]
    assert [choice.text for choice in online.choices] == [one.text for one in offline.outputs]


def test_logprobs_equal_the_offline_apis(both: tuple[openai.OpenAI, LLM]) -> None:
    client, llm = both
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=3, ignore_eos=True)
    offline = llm.generate(PROMPT, params, use_tqdm=False)[0]
    online = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3, echo=True, extra_body={"ignore_eos": True}
    )
    found = online.choices[0].logprobs
    assert found is not None and offline.outputs[0].logprobs is not None and offline.prompt_logprobs is not None
    rows = [*offline.prompt_logprobs[1:], *offline.outputs[0].logprobs]
    token_ids = [*offline.prompt_token_ids[1:], *offline.outputs[0].token_ids]
    expected = [row[token_id].logprob for row, token_id in zip(rows, token_ids, strict=True) if row is not None]
    assert (found.token_logprobs or [])[1:] == pytest.approx(expected, abs=1e-4)


def test_a_chat_equals_the_offline_apis(both: tuple[openai.OpenAI, LLM]) -> None:
    client, llm = both
    offline = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)[0]
    online = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, temperature=0)
    assert online.choices[0].message.content == offline.outputs[0].text
