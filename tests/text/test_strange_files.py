"""A model folder's text files are a stranger's: each is read, or refused by a ValueError that names the file."""

from __future__ import annotations

import copy
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.components import Components
from minivllm.generation_config import default_sampling_params
from minivllm.models.registry import ModelConfig
from minivllm.text import sandbox
from minivllm.text.chat import render_chat
from minivllm.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import make_byte_level, make_sentencepiece

QUIET = settings(suppress_health_check=list(HealthCheck))
ODD: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**64,
        1.5,
        float("nan"),
        "",
        "x",
        "\ud800",
        "<s>",
        [],
        {},
        [1],
        [[]],
        {"a": 1},
        [["a", "b"]],
    ),
    *("Sequence", "ByteLevel", "BPE", "Unigram", {"content": 5}, [{"name": "default"}], [{"name": 5, "template": "x"}]),
]
BROKEN = ["[]", "3", "null", "{", "", "[" * 50_000, "9" * 6000]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 10, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "sliding_window": 4, "head_dim": 16,
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "layer_types": ["full_attention"] * 2, "use_sliding_window": True, "eos_token_id": [1, 2], "bos_token_id": 1,
}  # fmt: skip
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}"}
GENERATION = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "max_new_tokens": 9, "num_beams": 1, "repetition_penalty": 1.1}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Everywhere in a JSON value (not in its long lists, which are vocabularies)."""
    if path:
        yield path
    if isinstance(value, (dict, list)) and len(value) < 60:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def damaged(draw: Any, value: Any) -> str:
    """The value as JSON, with another one, or none, in some places; or no JSON at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(BROKEN))
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(list(places(value)) or [(0,)]))
        inner = value
        for key in path:
            inner = inner[key]
        if draw(st.booleans()) and isinstance(inner, dict):
            inner.pop(last, None)
        else:
            inner[last] = copy.deepcopy(draw(st.sampled_from(ODD)))  # the second may go into the first
    return json.dumps(value)


def test_damage_leaves_what_it_draws_from_as_it_was() -> None:
    odd = next(value for value in ODD if value == {"a": 1})
    answers = iter([1, 2, ("chat_template",), False, odd, ("chat_template", "a"), False, "x"])
    assert json.loads(damaged(lambda _: next(answers), SPECIAL))["chat_template"] == {"a": "x"}
    assert odd == {"a": 1}


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    return [json.loads(make().backend.to_str()) for make in (make_byte_level, make_sentencepiece)]


@QUIET
@given(data=st.data())
def test_any_tokenizer_files_are_read_or_named(tmp_path: Path, whole: list[Any], data: st.DataObject) -> None:
    (tmp_path / "tokenizer.json").write_text(damaged(data.draw, data.draw(st.sampled_from(whole))))
    (tmp_path / "tokenizer_config.json").write_text(damaged(data.draw, SPECIAL))
    try:
        tokenizer = Tokenizer.from_folder(tmp_path)
    except ValueError as error:
        assert str(tmp_path) in str(error)
        return
    try:
        tokenizer.decode(tokenizer.encode("the fox 😀"))
        [tokenizer.token_bytes(i) for i in (0, 1, 5, 250, 299)]
        render_chat(tokenizer, [{"role": "user", "content": "x"}])
    except ValueError:
        pass


@QUIET
@given(data=st.data())
def test_any_config_is_read_or_named(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "config.json").write_text(damaged(data.draw, CONFIG))
    (tmp_path / "generation_config.json").write_text(damaged(data.draw, GENERATION))
    for read in (ModelConfig.from_folder, lambda folder: default_sampling_params(folder, Components())):
        try:
            read(tmp_path)
        except ValueError as error:
            assert str(error)


GROWING = """
    x ~ x; x + x; x * 3; [x, x, x]; {'a': x, 'b': x}; (x, x); x | string; x | list; x | join(x); x | tojson; x | sort; x[1:]
    x | replace('a', x); x.replace('a', 'b' * 99); x | upper | indent(40); x.split('a'); x.join(['a', x, x]); m(x)
    '%s%s' % (x, x); '{0}{0}{0}'.format(x); x | map('string') | list; x | batch(9) | list; x | unique | list; x.ljust(900)
    namespace(y=x); dict(y=x); x | length; 9 ** 99; x | int * x | int; range(99) | list; x | urlencode
"""
FORMS = """
    {% set x = EXPR %}; {% set x %}{{ EXPR }}{{ x }}{% endset %}; {% for i in range(9) %}{{ EXPR }}{% endfor %}; {{ EXPR }}
    {% for i in x %}{{ i }}{% endfor %}; {% if EXPR == x %}y{% endif %}; {% set ns.x = EXPR %}{% set x = ns.x %}
"""


def one_of(texts: str) -> st.SearchStrategy[str]:
    return st.sampled_from([text.strip() for text in re.split(r";|\n", texts) if text.strip()])


@settings(QUIET, max_examples=max(25, QUIET.max_examples // 4))
@given(lines=st.lists(st.tuples(one_of(FORMS), one_of(GROWING)), min_size=1, max_size=20))
def test_any_template_ends_within_its_budget(
    lines: list[tuple[str, str]], whole: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that makes more of what there is, in any order: it ends, as a text or as an error, and holds no gigabytes."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 2_000)
    monkeypatch.setattr(sandbox, "MAX_HANDLED_CHARS", 200_000)
    monkeypatch.setattr(sandbox, "MAX_RENDERED_CHARS", 50_000)
    head = "{% macro m(y) %}{{ y }}{{ y }}{% endmacro %}{% set ns = namespace(x='') %}{% set x = 'abc a' %}"
    source = head + "".join(form.replace("EXPR", f"({grow})") for form, grow in lines)
    tracemalloc.start()
    try:
        assert len(sandbox.run_template(source, {})) <= 50_000
    except Exception as error:
        assert not isinstance(error, MemoryError)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 50_000_000


@pytest.mark.parametrize("text", ["[" * 50_000, "[1]", "null"])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_config_that_is_no_object_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_folder(tmp_path)
    if name == "generation_config.json":
        with pytest.raises(ValueError, match=name):
            default_sampling_params(tmp_path, Components())


def test_a_tokenizer_the_library_panics_on_is_named(tmp_path: Path, whole: list[Any]) -> None:
    """Rust's panics arrive as an exception that is no Exception: it would end a server's task, or a notebook's kernel cell,
    without a word of ours."""
    broken = json.loads(json.dumps(whole[1]))
    broken["model"]["continuing_subword_prefix"] = "longer than any piece"
    (tmp_path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("entry", [{"name": "default"}, {"template": "x"}, {"name": 1, "template": "x"}, "x", None])
def test_a_list_of_templates_with_something_else_in_it_is_named(model_folder: Path, entry: Any) -> None:
    file = model_folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": [entry]}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template has an entry"):
        Tokenizer.from_folder(model_folder)


def test_a_template_file_that_is_no_text_is_named(model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not text in UTF-8"):
        Tokenizer.from_folder(model_folder)
