"""LLM.chat: one conversation or many, templates, and one BOS."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import assert_idle, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=5)
HELLO = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def llm(tokenizer: Tokenizer) -> LLM:
    return make_llm(tokenizer)


def test_one_conversation_gives_one_output_with_the_rendered_prompt(llm: LLM) -> None:
    outputs = llm.chat(HELLO, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["<user>the fox<assistant>"]


def test_a_list_of_conversations_gives_an_output_each(llm: LLM) -> None:
    other = [{"role": "user", "content": "a dog"}]
    outputs = llm.chat([HELLO, other], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["<user>the fox<assistant>", "<user>a dog<assistant>"]


def test_template_options(llm: LLM) -> None:
    assert llm.chat(HELLO, GREEDY, use_tqdm=False, add_generation_prompt=False)[0].prompt == "<user>the fox"
    own = llm.chat(HELLO, GREEDY, use_tqdm=False, chat_template="{{ x }}!", chat_template_kwargs={"x": "a"})
    assert own[0].prompt == "a!"


def test_a_template_that_adds_bos_gives_one_bos(sentencepiece: Tokenizer) -> None:
    """Case 25."""
    llm = make_llm(sentencepiece)
    template = "{{ bos_token }}{{ messages[0].content }}"
    chat = llm.chat(HELLO, GREEDY, use_tqdm=False, chat_template=template)[0]
    by_hand = llm.generate("<s>the fox", GREEDY, use_tqdm=False)[0]
    plain = llm.generate("the fox", GREEDY, use_tqdm=False)[0]
    for output in (chat, by_hand, plain):
        assert output.prompt_token_ids.count(sentencepiece.bos_token_id) == 1
        assert output.prompt_token_ids[0] == sentencepiece.bos_token_id
    assert chat.prompt_token_ids == by_hand.prompt_token_ids


@pytest.mark.parametrize(
    "messages", [[], "hello", [[]], [{"content": "x"}], [{"role": "user", "content": [{"type": "image_url"}]}]]
)
def test_a_malformed_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"messages|conversation"):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert_idle(llm)


def test_malformed_conversations_can_be_returned(llm: LLM) -> None:
    bad, good = llm.chat([[{"role": "user"}], HELLO], GREEDY, use_tqdm=False, on_invalid="return")
    assert bad.error == "messages[0] (user) has no content." and bad.finished
    assert good.error is None


def test_a_model_without_a_template_says_so(sentencepiece: Tokenizer) -> None:
    with pytest.raises(ValueError, match="sentencepiece has no default chat template"):
        make_llm(sentencepiece).chat(HELLO, GREEDY, use_tqdm=False)
