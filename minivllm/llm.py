"""LLM: the engine for scripts and notebooks, vLLM's offline API.

    llm = LLM("smollm2-135m")
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)

May not know torch: tensors live behind the executor.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.components import Components
from minivllm.config import EngineConfig
from minivllm.core.step import Executor
from minivllm.generation_config import default_sampling_params
from minivllm.input_processor import Prompt, as_prompt_list, end_token_ids
from minivllm.llm_engine import LLMEngine, Sink, TokenStream
from minivllm.output_processor import OutputKind, OutputProcessor, refused
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.text.chat import Message, render_chat
from minivllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.core.engine_core import EngineCore
    from minivllm.models.registry import ModelConfig
    from minivllm.observe.trace import Trace
    from minivllm.spec_decode.stats import SpecDecodeStats

logger = logging.getLogger("minivllm")


class LLM:
    """A model, its KV cache and its scheduler, ready to generate.

    model: "smollm2-135m", a Hugging Face folder, a .gguf file, or a Hub id.
    components: parts of the engine to replace (Components, or a dict seam name -> part).
    settings: the fields of EngineConfig. Raises ValueError for a setting that is wrong or not supported.

    Attributes
        config: the settled EngineConfig, every None filled in.   llm_engine: what runs the requests (`.engine_core` in it).
        model_config: the model's sizes.   model_path: its folder, None for random weights of a known model.
        dtype: what the weights are in, such as "bfloat16".
        tokenizer: None only for random weights without one: prompts are token ids then, and texts are empty.
    """

    model_config: ModelConfig
    dtype: str

    def __init__(
        self,
        model: str | Path = "smollm2-135m",
        *,
        components: Components | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = EngineConfig.from_kwargs(model=str(model), **settings)
        parts = components if isinstance(components, Components) else Components(components)
        folder = model_folder(config)
        tokenizer = load_tokenizer(config, folder)
        from minivllm.worker.model_runner import ModelRunner  # torch comes in here, when all that needs none is in order

        logger.info("Loading %s.", config.model)
        runner = ModelRunner(config, parts)
        self.model_config = runner.model_config
        self.dtype = runner.dtype_name
        engine = LLMEngine(
            config.resolved(runner.device_type),
            runner,
            tokenizer,
            vocab_size=self.model_config.vocab_size,
            model_max_len=self.model_config.max_position_embeddings,
            eos_token_ids=end_token_ids(tokenizer, self.model_config.eos_token_ids, runner.vocab_size),
            components=parts,
        )
        self._use(engine, tokenizer, parts, folder)
        runner.warm_up()
        logger.info(
            "Ready: max_model_len %d, up to %d sequences and %d tokens a step, prefix caching %s.",
            self.config.max_model_len,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            "off" if self.config.enable_prefix_caching is False else "on",
        )

    @classmethod
    def from_executor(
        cls,
        executor: Executor,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int,
        model_max_len: int,
        eos_token_ids: tuple[int, ...] = (),
        components: Components | None = None,
        model_path: Path | None = None,
    ) -> LLM:
        """The same API over any data plane, such as the echo executor (integers, exact). `model_path` is where a
        generation_config.json may lie. There is no `model_config` and no `dtype` then."""
        llm = cls.__new__(cls)
        parts = components or Components()
        engine = LLMEngine(
            (config or EngineConfig()).resolved("cpu"),
            executor,
            tokenizer,
            vocab_size=vocab_size,
            model_max_len=model_max_len,
            eos_token_ids=eos_token_ids,
            components=parts,
        )
        llm._use(engine, tokenizer, parts, model_path)
        return llm

    def _use(self, engine: LLMEngine, tokenizer: Tokenizer | None, components: Components, folder: Path | None) -> None:
        self.llm_engine = engine
        self.config = engine.config
        self.tokenizer = tokenizer
        self.model_path = folder
        recommended = folder if engine.config.generation_config == "auto" else None
        self._default_params = default_sampling_params(recommended, components)
        self._request_counter = itertools.count()
        self._is_shut_down = False

    @property
    def engine_core(self) -> EngineCore:
        return self.llm_engine.engine_core

    @property
    def spec_decode_stats(self) -> SpecDecodeStats | None:
        """What drafts were worth so far (acceptance by position, tokens per verification, times); None without
        speculative_config. `.reset()` begins anew."""
        speculation = getattr(self.llm_engine.executor, "speculation", None)
        return None if speculation is None else speculation.stats

    @property
    def trace(self) -> Trace | None:
        """What every step did, with LLM(trace=True); None without. It grows until `trace.clear()`."""
        return getattr(self.engine_core, "trace", None)

    # ---------------------------------------------------------------- text out

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        on_invalid: str = "raise",
    ) -> list[RequestOutput]:
        """Complete prompts, all in one continuously running batch. Outputs come in the order of the prompts.

        prompts: a text, token ids, {"prompt": ...} or {"prompt_token_ids": ...} (and "cache_salt"), or a list of those.
        sampling_params: for all, or one for each; None is the model's own default (`get_default_sampling_params`).
        use_tqdm: a progress bar on stderr; or a tqdm class of your own.
        priority: with scheduling_policy="priority", one number for each prompt; lower goes first.
        on_invalid: every prompt is checked before anything runs. "raise": ValueError names the refused ones by index, with
            reasons. "return": they come back with finish_reason "error" and `.error`, the others are answered.
        Ctrl-C ends the call (KeyboardInterrupt) after the step in flight; its requests are aborted, the engine stays usable.
        """
        return self._run(as_prompt_list(prompts), lambda prompt: prompt, sampling_params, use_tqdm, priority, on_invalid)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        on_invalid: str = "raise",
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations. The template's options are `render_chat`'s, the others
        `generate`'s."""

        def render(conversation: Any) -> Prompt:
            return self.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )

        one = isinstance(messages, str) or _is_conversation(messages)  # a bare text is refused as a conversation
        conversations = [messages] if one else list(messages)
        if not conversations:
            raise ValueError("There is no conversation: the list is empty.")
        return self._run(conversations, render, sampling_params, use_tqdm, priority, on_invalid)

    def stream(self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None) -> TokenStream:
        """One prompt, or one conversation, its output as it comes: an iterator of RequestOutputs that hold *only what is new*.

            for delta in llm.stream("Once upon a time"):
                print(delta.outputs[0].text, end="", flush=True)

        `.outputs[0].text`, `.token_ids` and `.logprobs` of all deltas, joined, are those `generate` gives. The last delta,
        and only that, has a finish_reason. Streams may be read in turns; what one yields while another is read waits for its
        reader. Closing a stream, or dropping it, aborts its request and frees its KV blocks. Raises ValueError at once for a
        bad prompt.
        """
        self._check_alive()
        request: Any = self.render_chat(prompt) if _is_conversation(prompt) else prompt  # type: ignore[arg-type]
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        sink: Sink = Sink()
        request_id = self.llm_engine.add_request(self._next_id(), request, params, OutputKind.DELTA, sink)
        return TokenStream(self.llm_engine, request_id, sink)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as the prompt that `chat` runs: {"prompt": text, "prompt_token_ids": ids}.

        messages: [{"role": "user", "content": "..."}, ...]; content may also be OpenAI's list of text parts.
        add_generation_prompt: end with the opening of the assistant's turn.
        chat_template: Jinja text, or the name of one of the model's templates; None is the model's default.
        chat_template_kwargs: further variables for the template, such as {"enable_thinking": False}.
        Raises ValueError for a malformed message, and, naming the model, for a template that is missing or fails.
        """
        tokenizer = self.get_tokenizer()
        text = render_chat(
            tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            template_kwargs=chat_template_kwargs,
        )
        # The template wrote the special tokens, BOS among them: the tokenizer must not add them again.
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    # ---------------------------------------------------------------- the engine's state

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for a model without one."""
        return self.llm_engine.input_processor.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, a fresh copy. SamplingParams() with generation_config="vllm"."""
        return copy.deepcopy(self._default_params)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Abort what is open and give back the model's memory. Also at the end of `with LLM(...) as llm:`."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---------------------------------------------------------------- one call of generate or chat

    def _run(
        self,
        items: Sequence[Any],
        to_prompt: Callable[[Any], Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        on_invalid: str,
    ) -> list[RequestOutput]:
        self._check_alive()
        if on_invalid not in ("raise", "return"):
            raise ValueError(f'on_invalid must be "raise" or "return", got {on_invalid!r}.')
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, len(items))
        priorities = _one_each("priority", 0 if priority is None else priority, len(items))
        engine, sink = self.llm_engine, Sink()
        results: dict[int, RequestOutput] = {}
        index_of: dict[str, int] = {}  # of the requests that run
        try:
            for i, item in enumerate(items):
                user_id = self._next_id()
                try:
                    prompt = to_prompt(item)
                    request_id = engine.add_request(user_id, prompt, params[i], OutputKind.FINAL_ONLY, sink, priorities[i])
                    index_of[request_id] = i
                except ValueError as error:
                    results[i] = refused(user_id, item, str(error))
            if results and on_invalid == "raise":
                raise ValueError(_refusals(results, len(items)))
            with _Progress(use_tqdm, len(index_of), engine.output_processor) as progress:
                while len(results) < len(items):
                    request_id, output = engine.next_output(sink, progress.show_speed)
                    results[index_of[request_id]] = output
                    progress.count(output)
        finally:
            engine.abort(index_of)  # after an error or Ctrl-C some are open
        return [results[i] for i in range(len(items))]

    def _next_id(self) -> str:
        return str(next(self._request_counter))

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("This LLM was shut down; make a new one.")


class _Progress:
    """tqdm's bar over requests, with the speed in tokens beside it."""

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int, outputs: OutputProcessor) -> None:
        self._outputs = outputs
        self._num_tokens_before = outputs.num_tokens
        self._num_prompt_tokens = 0
        self._bar: Any = None
        if use_tqdm:
            from tqdm import tqdm

            bar_class = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = bar_class(total=total, desc="Processed prompts", dynamic_ncols=True, miniters=0)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show_speed(self) -> None:
        if self._bar is not None:
            seconds = max(self._bar.format_dict["elapsed"], 1e-9)
            speed_in = self._num_prompt_tokens / seconds
            speed_out = (self._outputs.num_tokens - self._num_tokens_before) / seconds
            self._bar.set_postfix_str(f"input: {speed_in:.1f} tok/s, output: {speed_out:.1f} tok/s", refresh=False)
            self._bar.update(0)

    def count(self, output: RequestOutput) -> None:
        if self._bar is not None:
            self._num_prompt_tokens += len(output.prompt_token_ids)
            self.show_speed()
            self._bar.update(1)


def _one_each(name: str, value: Any, num_prompts: int) -> Sequence[Any]:
    """A list with one value for each prompt, from such a list or from one value for all."""
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise ValueError(f"{name} has {len(value)} entries for {num_prompts} prompts: it needs one for each.")
    return value


def _is_conversation(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def _refusals(results: Mapping[int, RequestOutput], num_prompts: int) -> str:
    if num_prompts == 1:
        return str(results[0].error)
    lines = "".join(f"\n  prompt {index}: {output.error}" for index, output in results.items())
    return f'{len(results)} of {num_prompts} prompts are refused (on_invalid="return" answers the others):{lines}'


def model_folder(config: EngineConfig) -> Path | None:
    """The model's folder, fetched if need be. Random weights need none: a known name's sizes are enough."""
    if config.load_format == "dummy":
        return Path(config.model) if Path(config.model).is_dir() else None
    from minivllm.models.hub import resolve_model

    return resolve_model(config.model)


def load_tokenizer(config: EngineConfig, model_folder: Path | None) -> Tokenizer | None:
    folder = model_folder if config.tokenizer is None else Path(config.tokenizer)
    if folder is None:
        return None
    try:
        return Tokenizer.from_folder(folder)
    except FileNotFoundError:
        if config.load_format == "dummy" and config.tokenizer is None:
            return None
        raise
