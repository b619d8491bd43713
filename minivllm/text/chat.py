"""Chat templates: a conversation rendered as the text the model was trained on.

Labs: used by `LLM.chat` and the server, built by none. May not know torch or transformers.

A template is a Jinja program that comes with the weights, so it is run as a stranger's: see text/sandbox.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.text.sandbox import run_template

if TYPE_CHECKING:
    from minivllm.text.tokenizer import Tokenizer

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
    try:
        return run_template(source, variables)
    except Exception as error:  # whatever a stranger's program may raise
        reason = " ".join(str(error).split())[:1000] or type(error).__name__
        raise ValueError(f"The chat template of {tokenizer.name} fails: {reason}") from error


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
