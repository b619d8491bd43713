"""Chat templates: a conversation rendered as the text the model was trained on.

Labs: used by `LLM.chat` and the server, built by none. May not know torch or transformers.

A template is a Jinja program that comes with the weights, so it is run as a stranger's: in Jinja's sandbox, without loaders,
with a bound on its loops and on what it writes. What it may call is what `transformers` offers templates: `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, `break` and `continue`, and the `generation` tag, which marks text for training
and means nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from minivllm.text.tokenizer import Tokenizer

MAX_LOOP_STEPS = 1_000_000  # of all loops of one rendering together
MAX_RENDERED_CHARS = 20_000_000
MAX_REPEAT = 1_000_000  # longest string or list a template may make by multiplication

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, special tokens included: encode it with `add_special_tokens=False`.

    messages: [{"role": "user", "content": "..."}, ...]; content may also be OpenAI's list of text parts.
    add_generation_prompt: end with the opening of the assistant's turn.
    chat_template: Jinja text, or the name of one of the model's templates; None is the model's default.
    template_kwargs: further variables for the template, such as {"enable_thinking": False}.
    Raises ValueError for a malformed message, and, naming the model, for a template that is missing, fails or does not end.
    """
    variables = {
        **tokenizer.special_tokens,
        "tools": None,
        "documents": None,
        **(template_kwargs or {}),
        "messages": check_messages(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    source = _pick_template(tokenizer, chat_template)
    token = _budget.set(_Budget())
    try:
        return _bounded_join(_compile(source).generate(variables))
    except Exception as error:  # whatever a stranger's program may raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"The chat template of {tokenizer.name} fails: {reason}") from error
    finally:
        _budget.reset(token)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of the messages with their content as one text each. Raises ValueError naming the message that is malformed."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f'messages must be a list of {{"role": ..., "content": ...}}, got {messages!r:.80}.')
    if not messages:
        raise ValueError("messages is empty: a conversation has at least one message.")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{index}] must be a dict with role and content, got {message!r:.80}.")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{index}] needs a role (system, user or assistant), got {role!r:.80}.")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"messages[{index}] ({role}) has no content.")
        text = None if content is None else _content_text(content, f"messages[{index}]")
        checked.append({**message, "role": role, "content": text})
    return checked


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: content must be a text or a list of parts, got {content!r:.80}.")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'{where}: content part of type {kind!r} is not supported, only {{"type": "text", "text": ...}}.')
        texts.append(part["text"])
    return "\n".join(texts)


def _pick_template(tokenizer: Tokenizer, chat_template: str | None) -> str:
    if chat_template is not None:
        return tokenizer.chat_templates.get(chat_template, chat_template)
    if "default" in tokenizer.chat_templates:
        return tokenizer.chat_templates["default"]
    named = f" (it has: {', '.join(tokenizer.chat_templates)})" if tokenizer.chat_templates else ""
    raise ValueError(
        f"{tokenizer.name} has no default chat template{named}: it may be a base model. Pass chat_template=, or use generate()."
    )


class _Budget:
    """Loop steps the rendering has left."""

    def __init__(self) -> None:
        self.left = MAX_LOOP_STEPS

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise SecurityError(f"its loops ran {MAX_LOOP_STEPS:,} steps without coming to an end.")


_budget: ContextVar[_Budget] = ContextVar("_budget")  # out of the template's reach, one for each rendering


@jinja2.pass_context  # which also keeps Jinja from evaluating it at compile time
def _spend(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.get().spend(1)
        yield item


def _spending_range(*args: int) -> range:
    numbers = safe_range(*args)
    _budget.get().spend(len(numbers))
    return numbers


def _bounded_join(pieces: Iterable[str]) -> str:
    parts: list[str] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise SecurityError(f"it wrote more than {MAX_RENDERED_CHARS:,} characters.")
    return "".join(parts)


class _SpendOnLoops(NodeTransformer):
    """Rewrites `for x in items` to `for x in items | spend`, so that nested loops draw on one budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "spend", [], [], None, None, lineno=node.lineno)
        return node


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` is its body."""

    tags = {"generation"}  # noqa: RUF012 (how Jinja declares it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace(), without names that reach into Python's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _Namespace._check(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: str) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it sets {name!r}: names in a namespace may not start with an underscore.")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers configures it for chat templates, with our bounds."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        self.filters["tojson"] = _tojson
        self.filters["spend"] = _spend
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"namespace": _Namespace, "range": _spending_range}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 10_000 and abs(right) <= 100):
            raise SecurityError(f"it computes {left!r:.20} ** {right!r:.20}.")
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * other > MAX_REPEAT:
                raise SecurityError(f"it repeats a text or list to {len(one) * other:,} items; the limit is {MAX_REPEAT:,}.")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _Sandbox()
    return environment.from_string(_SpendOnLoops().visit(environment.parse(source)))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
