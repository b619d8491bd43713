"""The public API over executors that need no model: the echo model, and one that says what it is told to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm import LLM
from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.step import SchedulerOutput
from minivllm.sim.echo import EchoExecutor, _Row
from minivllm.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ScriptedExecutor(EchoExecutor):
    """Says `script`, token by token, whatever the prompt."""

    def __init__(self, script: Sequence[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.script = list(script)

    def _next_token(self, row: _Row, token_ids: list[int]) -> int:
        return self.script[len(token_ids) - row.num_prompt_tokens]


def make_llm(
    tokenizer: Tokenizer,
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    model_max_len: int = 200,
    eos_token_ids: tuple[int, ...] = (),
    script: Sequence[int] | None = None,
    fault: Callable[[SchedulerOutput], Mapping[str, str] | None] | None = None,
    components: Components | None = None,
    model_path: Path | None = None,
    **settings: Any,
) -> LLM:
    options: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "fault": fault}
    if script is None:
        executor = EchoExecutor(num_blocks, block_size, **options)
    else:
        executor = ScriptedExecutor(script, num_blocks, block_size, **options)
    return LLM.from_executor(
        executor,
        EngineConfig(block_size=block_size, **settings),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        model_max_len=model_max_len,
        eos_token_ids=eos_token_ids,
        components=components,
        model_path=model_path,
    )


def num_free_blocks(llm: LLM) -> int:
    return int(llm.engine_core.scheduler.kv_cache_manager.block_pool.num_free_blocks)


def assert_idle(llm: LLM) -> None:
    """No request is left anywhere, and every block is free."""
    assert not llm.engine_core.has_unfinished_requests()
    assert not llm.llm_engine._sinks
    assert not llm.llm_engine.output_processor._open
    assert num_free_blocks(llm) == llm.engine_core.executor.num_blocks - 1


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [single[bytes([b])] for b in data]
