"""Chat templates: rendered as transformers renders them, messages checked, a stranger's template kept within bounds."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.text import sandbox
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
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "without coming to an end",
        ),
        ("{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60, "handled more"),
        ("{% set x = 'ab' %}" + "{% set x = x + x %}" * 60, "handled more"),
        ("{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60, "handled more"),
        ("{% set x = [1] %}" + "{% set x = [x, x, x, x] %}" * 40 + "{{ x == x }}", "handled more"),
        ("{% set x = {} %}" + "{% set x = {1: x, 2: x, 3: x} %}" * 40, "handled more"),
        ("{% set x = (1, 2) %}" + "{% set x = (x, x, x) %}" * 40, "handled more"),
        ("{% set x = [1] %}" + "{% set x = [x] * 1000 %}" * 6, "handled more"),
        ("{% set x = 9 ** 99 %}" + "{% set x = x * x %}" * 60, "integers of more than"),
        ("{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}", "more than"),
        ("{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}", "replaces a text by more than"),
        ("{{ ('a' * 1000000).join('b' * 1000000) }}", "handled more"),
        ("{{ (['a'] * 1000000) | join('b' * 1000000) }}", "handled more|repeats"),
        ("{{ ('b' * 1000000) | list | join('a' * 1000000) }}", "handled more"),
        ("{{ 'x'.ljust(10 ** 9) }}", "widens a text|computes"),
        ("{{ 'x'.center(1000000000) }}", "widens a text"),
        ("{{ 'x'.zfill(1000000000) }}", "widens a text"),
        ("{{ 'x' | indent(1000000000) }}", "widens a text"),
        ("{{ 'x\t'.expandtabs(1000000000) }}", r"calls expandtabs\(\)"),
        ("{{ '%1000000000d' % 1 }}", "formats a value"),
        ("{{ '%*d' % (1000000000, 1) }}", "formats a value"),
        ("{{ '%1000000000d' | format(1) }}", "formats a value"),
        ("{{ '{:>1000000000}'.format('x') }}", "formats a value"),
        ("{{ '{:>{w}}'.format('x', w=1000000000) }}", "formats a value"),
        ("{{ ('{0}' * 100000).format('x' * 100000) }}", "handled more"),
        ("{{ ([[1] * 1000] * 1000) | sum(start=[]) }}", "no numbers|handled more"),
        ("{{ messages | tojson(indent=1000000000) }}", "indents or parts JSON"),
        ("{{ messages | tojson(indent='x' * 1000000) }}", "indents or parts JSON"),
        ("{{ messages | tojson(separators=('x' * 1000000, ':')) }}", "indents or parts JSON"),
        ("{{ ('a\n' * 100000) | indent('x' * 100000) }}", "widens a text"),
        ("{{ ('a' * 1000000) | replace('a', new='b' * 1000000) }}", "replaces a text by more than"),
        ("{{ ('a' * 1000000) | replace(old='a', new='b' * 1000000) }}", "replaces a text by more than"),
        ("{{ (['a'] * 1000000) | join(d='b' * 1000000) }}", "handled more"),
        ("{{ 'x'.encode() * 1000000000 }}", r"calls encode\(\)"),
        ("{{ (1).to_bytes(1000000000, 'big') }}", r"calls to_bytes\(\)"),
        ("{{ 1.5 | round(1000000000) }}", "rounds to more"),
        ("{{ lipsum(n=1000000000) }}", "lipsum"),
        ("{{ 'x' | center(1000000000) }}", "No filter named 'center'"),
        ("{% set s = 'x' * 1000000 %}{% for i in range(9999) %}{{ s.count('y') or '' }}{% endfor %}", "handled more"),
        ("{% set s = 'x' * 5000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}", "without coming to an end"),
        ("{{ 'x' * 2000000000 }}", "repeats a text"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% set s = 'x' * 100000 %}{% for i in range(1000) %}{{ s }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_or_runs_away_is_an_error_naming_the_model(
    byte_level: Tokenizer, template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100_000)  # nearer than they are, so that they are reached soon
    monkeypatch.setattr(sandbox, "MAX_HANDLED_CHARS", 20_000_000)
    monkeypatch.setattr(sandbox, "MAX_RENDERED_CHARS", 10_000_000)
    with pytest.raises(ValueError, match=f"(?s)chat template of byte-level fails: .*({reason})"):
        render_chat(byte_level, HELLO, chat_template=template)


def test_a_template_that_only_takes_long_is_stopped_too(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices and comparisons are not paid for: the clock ends what the budget does not see."""
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    template = "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{% if s[1:] == s %}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="seconds without coming to an end"):
        render_chat(byte_level, HELLO, chat_template=template)


def test_an_ordinary_conversation_is_far_from_every_bound(byte_level: Tokenizer) -> None:
    """A thousand turns of two thousand characters, with what real templates do to each."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"<think>{i}</think>" + "word " * 400} for i in range(1000)]
    template = (
        "{% set ns = namespace(text='', n=0) %}{% for m in messages %}{% set c = m.content.split('</think>')[-1].strip() %}"
        "{% set ns.n = ns.n + 1 %}{{ '<|im_start|>' + m.role ~ '\n' ~ (c | trim | replace('  ', ' ')) + '<|im_end|>' }}"
        "{{ '%02d' % ns.n }}{{ '{:>4}'.format(ns.n) }}{% endfor %}"
    )
    text = render_chat(byte_level, turns, chat_template=template)
    assert text.startswith("<|im_start|>user\nword word") and text.endswith("<|im_end|>10001000")


def test_the_budget_of_loops_is_each_rendering_s_own(byte_level: Tokenizer) -> None:
    template = "{% for i in range(90000) %}{% endfor %}done"
    for _ in range(12):  # together more than one rendering may take
        assert render_chat(byte_level, HELLO, chat_template=template) == "done"
