"""Tokenizer: text to token ids and back, read from a model folder with the `tokenizers` library alone.

Labs: used by every lab, built by none. May not know torch or transformers (which cost seconds to import): it reads
`tokenizer.json` for the vocabulary and the rules, `tokenizer_config.json` for the names of the special tokens, and the chat
templates wherever a model keeps them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are not UTF-8
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece vocabularies spell a lone byte


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as visible characters: printable Latin-1 stands for itself, the other bytes, in order, for the
    characters from U+0100 on ("Ġ" is the space). Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        name: the model, for messages.   vocab_size: number of token ids it knows, added tokens included.
        special_tokens: role -> text, such as {"bos_token": "<s>"}.   bos_token_id, eos_token_id: None if the model has none.
        special_ids: ids that `skip_special_tokens` leaves out of text.   chat_templates: name -> Jinja text ("default" first).
        adds_bos: whether the tokenizer puts BOS before a text by itself.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        name: str = "tokenizer",
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # some tokenizer.json files carry the settings of their training run
        backend.no_padding()
        self.backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        self._anchor = self._find_anchor()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read a Hugging Face model folder. Raises FileNotFoundError without tokenizer.json, ValueError for a broken file."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json. If it has a tokenizer of another kind, convert it once:"
                " transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
        templates = _chat_templates(folder, config)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)), str(folder.name), special, templates)
        except BaseException as error:  # the library raises bare Exception, and where it panics, what is not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{file} is not a tokenizer that tokenizers {tokenizers.__version__} can read: {error}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens` lets the tokenizer add what the model was trained with (BOS, for most).

        A text that already starts with BOS, as one rendered from a chat template does, does not get a second one.
        Raises ValueError for text that is no Unicode (lone surrogates)."""
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise ValueError(f"The text is not valid Unicode (lone surrogates): {text[:60]!r}...") from None
        doubled = self.adds_bos and add_special_tokens and ids[:2] == [self.bos_token_id] * 2
        if doubled and text.startswith(self.special_tokens["bos_token"]):
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are not UTF-8 become U+FFFD, ids without a token (a padded vocabulary's) nothing."""
        try:
            text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            span = f"{min(token_ids)}..{max(token_ids)}"
            raise ValueError(f"Token ids must be from 0 to {self.vocab_size - 1}, got {span}.") from None
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """A conversation as text, or as token ids. For scripts that call transformers' method of this name; its defaults are
        kept. See text.chat.render_chat."""
        from minivllm.text.chat import render_chat

        text = render_chat(
            self,
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def token_to_piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling ("ĠParis", "▁Paris", "<0xE2>"), None for an id without a token."""
        piece: str | None = self.backend.id_to_token(token_id)
        return piece

    def token_to_id(self, piece: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(piece)
        return token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token adds to a running text: b" Paris", or half a character such as b"\\xf0\\x9f".

        The texts of a sequence of tokens do not add up to the text of the sequence (a character may be split over tokens),
        their bytes do."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int, *, first: bool = False) -> str:
        """Text of one token, special or not, inside a running text; with `first` at its start, where SentencePiece-like
        decoders drop the leading space."""
        if first or self._anchor is None:
            return self.decode([token_id], skip_special_tokens=False)
        anchor_id, anchor = self._anchor
        return self.decode([anchor_id, token_id], skip_special_tokens=False)[len(anchor) :]

    def _find_bytes(self, token_id: int) -> bytes:
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        # Not whole characters: the spelling tells the bytes.
        piece = self.token_to_piece(token_id) or ""
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if all(c in _BYTE_OF_CHAR for c in piece):
            return bytes(_BYTE_OF_CHAR[c] for c in piece)
        return text.encode()  # a token that really spells U+FFFD

    def _find_anchor(self) -> tuple[int, str] | None:
        """A plain token to stand before others, so that they are decoded as in the middle of a text."""
        for piece in ("a", "e", "A", "0", "▁a", "Ġa"):
            token_id = self.token_to_id(piece)
            if token_id is not None and token_id not in self.special_ids:
                return token_id, self.decode([token_id])
        return None

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.token_to_id(text)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}). Fetch the model again.") from error
    return data if isinstance(data, dict) else {}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8 ({error}). Fetch the model again, or save the file as UTF-8.") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The "..._token" entries, each a text or an object with its "content"."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            found[key] = value
    return found


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """A model keeps templates in tokenizer_config.json (one text, or a list of named ones) or in files, which win."""
    in_config = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        for entry in in_config:
            name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(template, str):
                where = folder / "tokenizer_config.json"
                raise ValueError(f"{where}: chat_template has an entry that is no name with a template: {entry!r:.80}.")
            templates[name] = template
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(file)
    return dict(sorted(templates.items(), key=lambda item: item[0] != "default"))
