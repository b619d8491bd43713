"""What clients get: RequestOutputs as OpenAI's JSON, whole and in chunks. Labs: built by none. May not know HTTP or the engine.

A choice's index counts over prompts and their n completions: prompt * n + completion.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.serving.protocol import ChatCompletionRequest, CompletionRequest
from minivllm.text.tokenizer import Tokenizer

Json = dict[str, Any]


def usage(prompts: Mapping[int, RequestOutput], num_output_tokens: int) -> Json:
    """Each prompt counts once, whatever n."""
    num_prompt = sum(len(output.prompt_token_ids) for output in prompts.values())
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in prompts.values())},
    }


class _Responses:
    """What the two have in common: the head of each response, and the frame of a chunk."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, include_usage: bool, response_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        self.include_usage = include_usage
        self.head: Json = {"id": response_id, "object": self.kind, "created": int(time.time()), "model": model}
        self.tokenizer = tokenizer

    def chunk(self, choices: list[Json], used: Json | None = None) -> Json:
        chunk = {**self.head, "object": self.chunk_kind, "choices": choices}
        if self.include_usage:
            chunk["usage"] = used
        return chunk


class Completions(_Responses):
    """Of one request to /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, request: CompletionRequest, response_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(request.include_usage, response_id, model, tokenizer)
        self.request = request
        self.n = request.n or 1
        self._begun: dict[int, int] = {}  # choices that have been spoken of -> length of their logprobs' text

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = [self._choice(i, output, one) for i, output in enumerate(outputs) for one in output.outputs]
        num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return {**self.head, "choices": choices, "usage": usage(dict(enumerate(outputs)), num_tokens)}

    def chunks(self, prompt: int, delta: RequestOutput) -> list[Json]:
        """Of one delta, a chunk for each completion that has something to say."""
        choices = [self._choice(prompt, delta, one) for one in delta.outputs if self._is_worth_telling(prompt, one)]
        return [self.chunk([choice]) for choice in choices]

    def _is_worth_telling(self, prompt: int, one: CompletionOutput) -> bool:
        """A token may be half a character, or held back: no text yet."""
        is_first = prompt * self.n + one.index not in self._begun
        return bool(one.text or one.finish_reason or one.logprobs or self.request.return_token_ids or is_first)

    def _choice(self, prompt: int, output: RequestOutput, one: CompletionOutput) -> Json:
        index = prompt * self.n + one.index
        is_first = index not in self._begun
        offset = self._begun.setdefault(index, 0)
        text, logprobs = one.text, one.logprobs
        token_ids: Sequence[int] = one.token_ids
        if self.request.echo and is_first:
            text = self._prompt_text(output) + text
            if logprobs is not None and output.prompt_logprobs is not None:
                logprobs = [*(row or {} for row in output.prompt_logprobs), *logprobs]
                token_ids = [*output.prompt_token_ids, *token_ids]
        choice: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": one.finish_reason}
        choice["stop_reason"] = one.stop_reason
        if logprobs is not None:
            choice["logprobs"] = self._logprobs(token_ids, logprobs, offset)
            self._begun[index] = offset + sum(map(len, choice["logprobs"]["tokens"]))
        if self.request.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = one.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if is_first else None
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(self, token_ids: Sequence[int], rows: Sequence[Mapping[int, Logprob]], offset: int) -> Json:
        """OpenAI's four parallel lists. The first token of an echoed prompt has no log-probability."""
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        num_top = self.request.logprobs or 0
        for token_id, row in zip(token_ids, rows, strict=True):
            text = self._token_text(token_id, row)
            found["tokens"].append(text)
            found["token_logprobs"].append(row[token_id].logprob if row else None)
            top = {p.decoded_token or f"token_id:{t}": p.logprob for t, p in row.items() if (p.rank or 0) <= num_top}
            found["top_logprobs"].append(top if row and num_top else None)
            found["text_offset"].append(offset)
            offset += len(text)
        return found

    def _token_text(self, token_id: int, row: Mapping[int, Logprob]) -> str:
        if row and row[token_id].decoded_token is not None:
            return row[token_id].decoded_token or ""
        return "" if self.tokenizer is None else self.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


class ChatCompletions(_Responses):
    """Of one request to /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, request: ChatCompletionRequest, response_id: str, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(request.include_usage, response_id, model, tokenizer)
        self.request = request
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (output,) = outputs
        choices = [self._end(one, {"message": {"role": "assistant", "content": one.text}}) for one in output.outputs]
        num_tokens = sum(len(one.token_ids) for one in output.outputs)
        response = {**self.head, "choices": choices, "usage": usage({0: output}, num_tokens)}
        return response | self._about_the_prompt(output)

    def chunks(self, prompt: int, delta: RequestOutput) -> list[Json]:
        """Of one delta: the role of each completion that begins, then what it says."""
        found: list[Json] = []
        for one in delta.outputs:
            if one.index not in self._begun:
                is_first = not self._begun
                self._begun.add(one.index)
                role = {"index": one.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                chunk = self.chunk([{**role, "finish_reason": None}])
                found.append(chunk | self._about_the_prompt(delta) if is_first else chunk)
            if one.text or one.finish_reason or one.logprobs or self.request.return_token_ids:
                found.append(self.chunk([self._end(one, {"delta": {"content": one.text} if one.text else {}})]))
        return found

    def _end(self, one: CompletionOutput, said: Json) -> Json:
        choice: Json = {"index": one.index, **said, "logprobs": None, "finish_reason": one.finish_reason}
        choice["stop_reason"] = one.stop_reason
        if one.logprobs is not None:
            rows = zip(one.token_ids, one.logprobs, strict=True)
            choice["logprobs"] = {"content": [self._logprob(token_id, row) for token_id, row in rows], "refusal": None}
        if self.request.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    def _about_the_prompt(self, output: RequestOutput) -> Json:
        more: Json = {}
        if self.request.prompt_logprobs is not None:
            more["prompt_logprobs"] = _prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        return more

    def _logprob(self, token_id: int, row: Mapping[int, Logprob]) -> Json:
        num_top = self.request.top_logprobs or 0
        top = sorted((p.rank or 0, t) for t, p in row.items() if (p.rank or 0) <= num_top)
        return {**self._token(token_id, row), "top_logprobs": [self._token(t, row) for _, t in top]}

    def _token(self, token_id: int, row: Mapping[int, Logprob]) -> Json:
        data = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        return {"token": row[token_id].decoded_token or "", "logprob": row[token_id].logprob, "bytes": list(data)}


def _prompt_logprobs(rows: Sequence[Mapping[int, Logprob] | None] | None) -> list[Json | None] | None:
    """vLLM's shape: {token id: {logprob, rank, decoded_token}}."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {str(t): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token} for t, p in row.items()}
        for row in rows
    ]
