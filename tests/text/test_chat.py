"""Chat templates: rendered as transformers renders them, messages checked, a stranger's template kept within bounds."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.text.chat import check_messages, render_chat
from minivllm.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
LONGER = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße\n 日本 👩‍👩‍👧"},
    {"role": "assistant", "content": " fine "},
    {"role": "user", "content": '"quoted" {{ not_a_variable }}'},
]
TEMPLATES = {
    "whitespace control": """
    {%- for message in messages %}
        {% if message.role == 'system' %}
            {%- continue %}
        {% endif %}
        {{ message.role | upper }}: {{ message['content'].strip() }}
    {% endfor %}
    {%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    "namespace and tojson": """
    {%- set ns = namespace(n=0) %}
    {% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ m | tojson }}
    {% endfor %}
    {{ messages | tojson(indent=2) }}""",
    "special tokens": """
    {{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ pad_token is defined }}""",
    "generation tag": """
    {% for m in messages %}
        {% if m.role == 'assistant' %}
            {% generation %}{{ m.content }}
            {% endgeneration %}
        {% else %}{{ m.content }}{% endif %}
    {% endfor %}""",
    "macros, slices, loop": """
    {% macro show(m) %}[{{ m.role }}|{{ m.content }}]{% endmacro %}
    {% for m in messages[::-1] %}
        {{ loop.index }}{{ show(m) }}
        {% if loop.last %}!{% elif loop.index0 == 2 %}{% break %}{% endif %}
    {% endfor %}
    {{ tools is none }}""",
    "loops over a range": """
    {% for i in range(messages | length) %}{{ i }}{{ messages[i].content[:3] }}{{ loop.length }}{% endfor %}""",
}


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("messages", [HELLO, LONGER])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_model_s_template_renders_as_in_transformers(
    smollm2_tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    ours = render_chat(smollm2_tokenizer, messages, add_generation_prompt=add_generation_prompt)
    theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert ours == theirs
    tokens = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert smollm2_tokenizer.encode(ours, add_special_tokens=False) == tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_templates_render_as_in_transformers(smollm2_tokenizer: Tokenizer, reference: Any, name: str) -> None:
    theirs = reference.apply_chat_template(LONGER, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True)
    assert render_chat(smollm2_tokenizer, LONGER, chat_template=TEMPLATES[name]) == theirs


def test_the_tokenizer_offers_it_under_transformers_name(smollm2_tokenizer: Tokenizer, reference: Any) -> None:
    for options in ({"tokenize": False}, {"tokenize": False, "add_generation_prompt": True}):
        assert smollm2_tokenizer.apply_chat_template(HELLO, **options) == reference.apply_chat_template(HELLO, **options)
    ids = reference.apply_chat_template(HELLO, return_dict=False)
    assert smollm2_tokenizer.apply_chat_template(HELLO) == ids


def test_a_template_that_writes_bos_gives_one_bos(sentencepiece: Tokenizer) -> None:
    text = render_chat(sentencepiece, HELLO, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert text == "<s>Hello"
    for add_special_tokens in (False, True):  # LLM.chat's way, and a user's who passes the rendered text to generate()
        assert sentencepiece.encode(text, add_special_tokens).count(sentencepiece.bos_token_id) == 1


def test_strftime_now_is_today(byte_level: Tokenizer) -> None:
    text = render_chat(byte_level, HELLO, chat_template="{{ strftime_now('%Y') }}")
    assert text == str(datetime.datetime.now().year)


def test_template_kwargs_reach_the_template(byte_level: Tokenizer) -> None:
    template = "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
    assert render_chat(byte_level, HELLO, chat_template=template, template_kwargs={"enable_thinking": False}) == "quick"


# ---------------------------------------------------------------------- where templates are kept


def test_a_template_in_tokenizer_config(model_folder: Path) -> None:
    add_to_config(model_folder, chat_template="config {{ messages[0].content }}")
    assert render_chat(Tokenizer.from_folder(model_folder), HELLO) == "config Hello"


def test_named_templates_in_tokenizer_config(model_folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    add_to_config(model_folder, chat_template=named)
    tokenizer = Tokenizer.from_folder(model_folder)
    assert render_chat(tokenizer, HELLO) == "plain"
    assert render_chat(tokenizer, HELLO, chat_template="tool_use") == "tools"


def test_template_files_win_over_tokenizer_config(model_folder: Path) -> None:
    add_to_config(model_folder, chat_template="config")
    (model_folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    (model_folder / "additional_chat_templates").mkdir()
    (model_folder / "additional_chat_templates" / "rag.jinja").write_text("rag", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(model_folder)
    assert render_chat(tokenizer, HELLO) == "file"
    assert render_chat(tokenizer, HELLO, chat_template="rag") == "rag"


def test_a_model_without_a_template_is_named_with_the_way_out(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=rf"{model_folder.name} has no default chat template.*chat_template="):
        render_chat(Tokenizer.from_folder(model_folder), HELLO)


def add_to_config(folder: Path, **entries: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | entries), encoding="utf-8")


# ---------------------------------------------------------------------- messages


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert check_messages([{"role": "user", "content": parts}])[0]["content"] == "one\ntwo"


def test_other_keys_of_a_message_reach_the_template() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    checked = check_messages(
        [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "1", "name": "f"}]
    )
    assert checked[0]["tool_calls"] == calls and checked[0]["content"] is None and checked[1]["name"] == "f"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages is empty"),
        ("Hello", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["Hello"], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([{"role": "user"}], r"messages\[0\] \(user\) has no content"),
        ([*HELLO, {"role": "user", "content": 5}], r"messages\[1\]: content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url' is not supported"),
        ([{"role": "user", "content": ["bare"]}], "type 'str' is not supported"),
    ],
)
def test_a_malformed_message_is_named(byte_level: Tokenizer, messages: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_chat(byte_level, messages, chat_template="x")


# ---------------------------------------------------------------------- a stranger's template


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "[Uu]nexpected end of template"),
        ("{{ messages[0].content.nothing.more }}", "no attribute 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "append"),
        ("{% set ns = namespace(_x=1) %}", "underscore"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", r"computes 10 \*\* 9|[Rr]ange too big"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "without coming to an end"),
        ("{% set s = 'x' * 5000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}", "without coming to an end"),
        ("{{ 'x' * 2000000000 }}", "repeats a text"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% set s = 'x' * 100000 %}{% for i in range(1000) %}{{ s }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_or_runs_away_is_an_error_naming_the_model(
    byte_level: Tokenizer, template: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)chat template of byte-level fails: .*({reason})"):
        render_chat(byte_level, HELLO, chat_template=template)


def test_the_budget_of_loops_is_each_rendering_s_own(byte_level: Tokenizer) -> None:
    template = "{% for i in range(90000) %}{% endfor %}done"
    for _ in range(12):  # together more than one rendering may take
        assert render_chat(byte_level, HELLO, chat_template=template) == "done"
