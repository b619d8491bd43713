"""The `minivllm` command: generate, chat, serve, fetch, compile, bench.

May not import torch, or anything that does, before a command needs it: `minivllm --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import re
import sys
import time
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import __version__
from minivllm import config as config_module
from minivllm.config import EngineConfig

if TYPE_CHECKING:
    from minivllm.llm import LLM
    from minivllm.outputs import RequestOutput
    from minivllm.sampling_params import SamplingParams

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

DEFAULT_MAX_TOKENS = 256
_CHOICES = {
    "dtype": config_module.DTYPES,
    "load_format": config_module.LOAD_FORMATS,
    "scheduling_policy": config_module.POLICIES,
    "prefix_cache": config_module.PREFIX_CACHES,
    "quantization": ("int4",),
    "attention_backend": config_module.ATTENTION_BACKENDS,
    "generation_config": config_module.GENERATION_CONFIGS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors a user can cause are one message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # the benchmarks parse their own arguments
        return _guarded(lambda: _bench(arguments[1:]))
    args = _parser().parse_args(arguments)
    return _guarded(lambda: int(args.run(args)))


def _guarded(run: typing.Callable[[], int]) -> int:
    try:
        return run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `minivllm generate ... | head`: the reader has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return EXIT_FAILED


# ---------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minivllm", description="A mini LLM inference engine with vLLM's design and names.")
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete prompts", description="Complete prompts, all in one batch.")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="without any, one prompt a line is read from stdin")
    generate.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; - is stdin")
    generate.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    generate.add_argument("--json", action="store_true", help="one JSON object a line, with token ids and why each ended")
    generate.add_argument(
        "--trace",
        dest="trace_file",
        metavar="FILE",
        help="write what every step did: .jsonl for minivllm.observe, .json for ui.perfetto.dev",
    )
    _add_sampling_arguments(generate)
    _add_engine_arguments(generate)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model", description="Talk to a model. /reset forgets, /exit leaves.")
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _add_sampling_arguments(chat)
    _add_engine_arguments(chat)
    chat.set_defaults(run=_chat)

    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model with OpenAI's API, Prometheus metrics at /metrics and a page for people at /.",
    )
    serve.add_argument("served_model", nargs="?", metavar="MODEL", help='as --model; "echo" needs no weights')
    _add_server_arguments(serve)
    _add_engine_arguments(serve)
    serve.set_defaults(run=_serve)

    fetch = commands.add_parser(
        "fetch", help="download a model", description="Fetch a model; the last line of stdout is its folder."
    )
    fetch.add_argument("name", metavar="NAME", help='"smollm2-135m", a Hub id, or a .gguf file')
    fetch.add_argument("--from", dest="source", metavar="FILE", help="take the download from this file instead of the network")
    fetch.set_defaults(run=_fetch)

    compile_ = commands.add_parser(
        "compile",
        help="make a model faster on this CPU, once",
        description="Compile a model for this machine's CPU: minutes, once, and every later start finds it in the cache."
        " It is for one dtype, torch version and number of threads. The last line of stdout is its folder.",
    )
    compile_.add_argument("name", metavar="NAME", help='"smollm2-135m", a folder, a Hub id, or a .gguf file')
    compile_.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="as the engine's (auto)")
    compile_.add_argument("--quantization", choices=("int4",), help="as the engine's (none)")
    compile_.add_argument(
        "--eagle-head",
        metavar="FOLDER",
        help="and this EAGLE head (default: the one in the package, if it fits)",
    )
    compile_.set_defaults(run=_compile)

    commands.add_parser("bench", help="measure: `bench --help` lists what", add_help=False)
    return parser


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "What is not given is the model's own default.")
    group.add_argument("--max-tokens", type=int, help=f"most tokens to generate (default {DEFAULT_MAX_TOKENS})")
    group.add_argument("--min-tokens", type=int, help="fewest tokens to generate")
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int, help="0 is off")
    group.add_argument("--min-p", type=float)
    group.add_argument("--sampling-seed", type=int, metavar="SEED", help="noise of every request (--seed is the engine's)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end token")


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    group.add_argument("--api-key", action="append", metavar="KEY", help="clients must send one; may be given several times")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="what clients call the model; the first is said")
    group.add_argument("--max-open-requests", type=int, default=1024, metavar="N", help="more get 429 (default: %(default)s)")
    group.add_argument("--max-request-bytes", type=int, default=8 << 20, metavar="N", help="of a body (default: %(default)s)")
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="run templates that come with requests (sandboxed)"
    )
    group.add_argument(
        "--shutdown-timeout", type=float, default=60.0, metavar="S", help="for open answers (default: %(default)s)"
    )
    group.add_argument("--log-requests", action="store_true", help="a line for each")


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of EngineConfig, with vLLM's spelling. None given means the field's default."""
    group = parser.add_argument_group("engine")
    types_of = typing.get_type_hints(EngineConfig)
    help_of = _field_help()
    for field in dataclasses.fields(EngineConfig):
        if field.name == "trace":  # a command that writes one has --trace FILE
            continue
        flag, default = "--" + field.name.replace("_", "-"), field.default
        text = help_of.get(field.name, "") + ("" if default is None else f" (default: {default})")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%").strip()}
        kinds = _union_members(types_of[field.name])
        if field.name == "speculative_config":
            group.add_argument(flag, type=_json_object, metavar="JSON", **options)
        elif bool in kinds:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif field.name in _CHOICES:
            group.add_argument(flag, choices=_CHOICES[field.name], **options)
        else:
            group.add_argument(flag, type=kinds[0], metavar=kinds[0].__name__.upper(), **options)
    group.add_argument("--components", metavar="DIR", help="use the parts found in a folder laid out like minivllm/")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; it looks like {{"method": "ngram", ...}}')
    return value


def _union_members(hint: Any) -> tuple[type, ...]:
    """(int,) for int and for int | None."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(member for member in members if member is not type(None))


def _field_help() -> dict[str, str]:
    """What EngineConfig's docstring says of each field: the text after "name:" up to the next one."""
    names = "|".join(field.name for field in dataclasses.fields(EngineConfig))
    parts = re.split(rf"(?:^|\s)({names}):\s", EngineConfig.__doc__ or "")
    texts = (re.split(r"\n\s*\n|\n    \w", part)[0] for part in parts[2::2])  # not the next section's heading
    return {name: " ".join(text.split()).rstrip(".") for name, text in zip(parts[1::2], texts, strict=True)}


def _sampling_params(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The model's defaults with the given flags on top. Built anew, so that every value is checked."""
    from minivllm.sampling_params import SamplingParams

    given = _sampling_flags(args)
    default = llm.get_default_sampling_params()
    if default.max_tokens == SamplingParams().max_tokens:  # vLLM's 16 is for its API, not for a person at a terminal
        given = {"max_tokens": DEFAULT_MAX_TOKENS} | given
    return default.replaced(**given)


def _sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    flags = {"sampling_seed": "seed", "stop": "stop", "ignore_eos": "ignore_eos"}
    flags |= {name: name for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p")}
    return {name: getattr(args, flag) for flag, name in flags.items() if getattr(args, flag) is not None}


def _engine_flags(args: argparse.Namespace) -> dict[str, Any]:
    flags = {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig) if hasattr(args, f.name)}
    return flags | ({"trace": True} if getattr(args, "trace_file", None) else {})


def _check(args: argparse.Namespace) -> None:
    """Tell a wrong flag before a model is fetched and torch imported. Raises ValueError."""
    from minivllm.sampling_params import SamplingParams

    EngineConfig.from_kwargs(**_engine_flags(args))
    SamplingParams(**{"max_tokens": None} | _sampling_flags(args))
    if path := getattr(args, "trace_file", None):
        if Path(path).suffix not in (".jsonl", ".json"):
            raise ValueError(f"--trace {path}: the name must end in .jsonl (minivllm.observe) or .json (ui.perfetto.dev).")
        if not Path(path).parent.is_dir():
            raise ValueError(f"--trace {path}: there is no folder {Path(path).parent}.")


def _start(args: argparse.Namespace) -> LLM:
    """Build the engine; what it does is said on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("minivllm").setLevel(logging.INFO)
    from minivllm.components import Components
    from minivllm.llm import LLM

    return LLM(**_engine_flags(args), components=Components.from_dir(args.components) if args.components else None)


# ---------------------------------------------------------------------- commands


def _generate(args: argparse.Namespace) -> int:
    _check(args)
    prompts = _read_prompts(args)
    with _start(args) as llm:
        params = _sampling_params(args, llm)
        if args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, params, use_tqdm=sys.stderr.isatty(), on_invalid="return")
        else:
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty(), on_invalid="return")
        if args.trace_file:
            _write_trace(llm, args.trace_file)
    for prompt, output in zip(prompts, outputs, strict=True):
        if args.json:
            print(json.dumps(_as_json(prompt, output), ensure_ascii=False))
        elif output.error is None:
            print(prompt if args.chat else "", output.outputs[0].text, sep="\n" if args.chat else prompt, end="\n\n")
        if output.error is not None:
            print(f"minivllm: prompt {prompt[:40]!r}: {output.error}", file=sys.stderr)
    return EXIT_FAILED if any(output.error is not None for output in outputs) else 0


def _write_trace(llm: LLM, path: str) -> None:
    from minivllm.observe import perfetto

    assert llm.trace is not None
    if Path(path).suffix == ".json":
        perfetto.export(llm.trace, path)
    else:
        llm.trace.save(path)
    print(f"{len(llm.trace.steps)} steps written to {path}", file=sys.stderr)


def _read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts and args.prompts_file:
        raise ValueError("Give prompts either as arguments or with --prompts-file, not both.")
    if args.prompts:
        return list(args.prompts)
    if args.prompts_file and args.prompts_file != "-":
        text = Path(args.prompts_file).read_text(encoding="utf-8")
    else:
        if sys.stdin is None:
            raise ValueError("There is no prompt: stdin is closed. Give some as arguments, or in a --prompts-file.")
        if sys.stdin.isatty():
            print("Prompts, one a line; Ctrl-D ends:", file=sys.stderr)
        text = sys.stdin.read()
    prompts = [line for line in text.split("\n") if line.strip()]  # not splitlines(): U+2028 and its like are text
    if not prompts:
        raise ValueError("There is no prompt. Give some as arguments, in a --prompts-file, or on stdin, one a line.")
    return prompts


def _as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "error": output.error,
    }


def _chat(args: argparse.Namespace) -> int:
    _check(args)
    if sys.stdin is None:
        raise ValueError("There is nobody to talk to: stdin is closed.")
    with _start(args) as llm:
        params = _sampling_params(args, llm)
        beginning = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(beginning)
        if sys.stdin.isatty():
            print(
                "Say something. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.",
                file=sys.stderr,
            )
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, params)
            except ValueError as error:  # the conversation has become too long, most likely
                messages.pop()
                print(f"minivllm: {error} (/reset starts over)", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    """What the user types, until the end of input. Ctrl-C gives up a line, not the conversation."""
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(ImportError):  # not on Windows
        importlib.import_module("readline")  # gives input() editing and a history
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
            continue
        if line:
            yield line


def _answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Stream one answer to stdout; returns what was said, also if Ctrl-C cut it short."""
    said: list[str] = []
    num_tokens = 0
    begin = first = time.perf_counter()
    error: str | None = None
    with llm.stream(messages, params) as stream:
        try:
            for delta in stream:
                first = time.perf_counter() if num_tokens == 0 else first
                num_tokens += len(delta.outputs[0].token_ids)
                said.append(delta.outputs[0].text)
                print(said[-1], end="", flush=True)
                error = delta.error
        except KeyboardInterrupt:
            print(" [stopped]", end="")
    print(flush=True)
    if error is not None:
        print(f"minivllm: {error}", file=sys.stderr)
    seconds = time.perf_counter() - first
    if num_tokens > 1:
        speed = (num_tokens - 1) / max(seconds, 1e-9)  # the first token came with the prompt
        print(f"[{num_tokens} tokens, first after {first - begin:.2f} s, then {speed:.1f} tok/s]", file=sys.stderr)
    return "".join(said)


def _serve(args: argparse.Namespace) -> int:
    flags = _engine_flags(args)
    if args.served_model is not None and flags.setdefault("model", args.served_model) != args.served_model:
        raise ValueError(f"Two models are named, {args.served_model} and --model {flags['model']}: give one.")
    config = EngineConfig.from_kwargs(**flags)
    for name, low in (("max_open_requests", 1), ("max_request_bytes", 1), ("shutdown_timeout", 0)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}.")
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must be from 0 to 65535, got {args.port}.")
    try:
        from minivllm.serving.launch import LaunchSettings, ServerSettings, serve
    except ModuleNotFoundError as error:
        raise ImportError(f"minivllm serve needs {error.name}: pip install 'minivllm[serve]'") from None
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in ("minivllm", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.INFO)
    keys = args.api_key or ([os.environ["MINIVLLM_API_KEY"]] if os.environ.get("MINIVLLM_API_KEY") else [])
    server = ServerSettings(
        model_names=tuple(args.served_model_name or [config.model]),
        api_keys=tuple(keys),
        max_open_requests=args.max_open_requests,
        max_request_bytes=args.max_request_bytes,
        trust_request_chat_template=args.trust_request_chat_template,
    )
    return serve(
        LaunchSettings(
            server,
            {**flags, "model": config.model},
            host=args.host,
            port=args.port,
            components=Path(args.components) if args.components else None,
            shutdown_timeout=args.shutdown_timeout,
            log_requests=args.log_requests,
        )
    )


def _fetch(args: argparse.Namespace) -> int:
    from minivllm.models.hub import fetch

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("minivllm").setLevel(logging.INFO)
    print(fetch(args.name, source=args.source))
    return 0


def _compile(args: argparse.Namespace) -> int:
    import torch

    from minivllm.models.compile_cache import compile_model
    from minivllm.models.hub import resolve_model
    from minivllm.models.registry import ModelConfig
    from minivllm.spec_decode.eagle import EagleHead, shipped_head
    from minivllm.spec_decode.eagle_compiled import compile_head
    from minivllm.worker.device import choose_dtype, limit_threads

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    limit_threads()  # as the engine will
    begin = time.perf_counter()

    def say(stage: str) -> None:
        print(f"[{time.perf_counter() - begin:4.0f} s] {stage} ...", file=sys.stderr, flush=True)

    dtype = choose_dtype(args.dtype, torch.device("cpu"))
    target = ModelConfig.from_folder(resolve_model(args.name))
    head = Path(args.eagle_head) if args.eagle_head else shipped_head(target)
    if head is not None:
        EagleHead.load(head, target, dtype)  # raises before minutes of work
    folder = compile_model(args.name, dtype, say, args.quantization)
    if head is not None:
        compile_head(args.name, head, dtype, say)
    print(folder)
    return 0


_BENCHES = {
    "throughput": "minivllm.bench.throughput",
    "compare": "minivllm.bench.compare",
    "latency": "minivllm.bench.latency",
    "perplexity": "minivllm.bench.perplexity",
    "serve": "minivllm.bench.serve",
    "spec": "minivllm.bench.spec",
    "gpu-report": "minivllm.bench.gpu_report",
}


def _bench(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="minivllm bench", description="Measure. `minivllm bench NAME --help` says more.")
    parser.add_argument(
        "name", choices=sorted(_BENCHES), help="an engine, several of them, a server under load, speculation, or a GPU"
    )
    name = parser.parse_args(argv[:1]).name
    return int(importlib.import_module(_BENCHES[name]).main(argv[1:]))
