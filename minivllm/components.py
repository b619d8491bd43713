"""The seams: the parts of the engine a lab (or anyone) can replace, by injection.

    LLM(model, components=Components({"sampler": MySampler}))
    LLM(model, components=Components.from_dir("my_engine"))          # files that mirror minivllm/'s tree

A part is a function or a class. It says what it can do in an attribute `capabilities` (a frozenset of names); a part without
the attribute is taken to do everything the reference does. What a part cannot do is switched off with one line in the log,
or refused by name if the user asked for it. May not know torch: parts are only carried here.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("minivllm")


@dataclass(frozen=True)
class Seam:
    """One replaceable part. `file` is relative to `minivllm/` and to a student's `my_engine/`; `attribute` is the part's name
    in it; `capabilities` is all that the reference can do; `contract` is what an implementation must offer, in words.
    `triton_file`: a second file whose part, if it is there, is taken where Triton kernels run."""

    name: str
    file: str
    attribute: str
    capabilities: frozenset[str]
    contract: str
    triton_file: str | None = None

    def file_in(self, root: Path) -> Path | None:
        """The file of a student's folder that the part is taken from here; None if there is none."""
        kernels = root / self.triton_file if self.triton_file else None
        if kernels is not None and kernels.is_file() and triton_runs_here():
            return kernels
        path = root / self.file
        return path if path.is_file() else None

    def reference(self) -> Any:
        module = importlib.import_module("minivllm." + self.file.removesuffix(".py").replace("/", "."))
        return getattr(module, self.attribute)


def _seam(name: str, file: str, attribute: str, capabilities: str, contract: str, triton_file: str | None = None) -> Seam:
    able = frozenset(c.strip() for c in capabilities.split(",") if c.strip())
    return Seam(name, file, attribute, able, contract, triton_file)


def triton_runs_here() -> bool:
    """Whether Triton kernels run in this process: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""
    import torch  # only where there are kernels to be asked about

    from minivllm.attention.gpu import why_not

    return why_not("cuda" if torch.cuda.is_available() else "cpu", torch.float32) is None


SEAMS: dict[str, Seam] = {
    s.name: s
    for s in (
        _seam("block_hash", "core/block_hash.py", "hash_block", "salt", "hash_block(parent, tokens, extra) -> hashable"),
        _seam(
            "block_pool",
            "core/block_pool.py",
            "BlockPool",
            "allocate, caching",
            "class(num_blocks): allocate(n), free(blocks), num_free_blocks; with caching also touch, get_cached_block, publish,"
            " unpublish, reset_prefix_cache",
        ),
        _seam(
            "kv_cache_manager",
            "core/kv_cache_manager.py",
            "KVCacheManager",
            "paging, prefix caching",
            "class(block_pool, block_size, max_model_len, enable_caching, hash_block): get_computed_blocks, has_room,"
            " allocate_slots, free, get_block_ids, reset_prefix_cache",
        ),
        _seam(
            "radix_cache",
            "core/radix_cache.py",
            "RadixCache",
            "radix",
            "class(): match_prefix(keys), insert(keys, blocks, start, end), evict(block), reset(), len()",
        ),
        _seam(
            "scheduler",
            "core/scheduler.py",
            "Scheduler",
            "stops, whole prompts, preemption, chunking, mixed batches, priority, longest prefix",
            "class(config, kv_cache_manager): requests, add_request, schedule, update_from_output, requests_in,"
            " finish_requests",
        ),
        _seam(
            "slot_mapping",
            "worker/input_batch.py",
            "slot_mapping",
            "",
            "slot_mapping(positions [T], block_table [M], block_size) -> slots [T]; NumPy arrays",
        ),
        _seam(
            "write_kv",
            "attention/reference.py",
            "write_kv",
            "",
            'write_kv(key, value, kv_cache, slot_mapping); with capability "graphs" it may be captured into a CUDA graph',
        ),
        _seam(
            "attention.decode",
            "attention/reference.py",
            "paged_decode",
            "sliding window",
            'paged_decode(q, kv_cache, block_tables, seq_lens, *, scale, sliding_window); with capability "graphs" it may be'
            " captured into a CUDA graph",
            "attention/triton_kernels.py",
        ),
        _seam(
            "attention.prefill",
            "attention/reference.py",
            "paged_prefill",
            "sliding window",
            "paged_prefill(q, kv_cache, query_start_loc, block_tables, seq_lens, *, scale, sliding_window)",
        ),
        _seam(
            "sampler",
            "sampling/sampler.py",
            "Sampler",
            "temperature, top_k, top_p, min_p, logprobs, penalties, logit_bias, allowed_token_ids, bad_words",
            "class: __call__(logits [B, V] float32, SamplingMetadata) -> SamplerOutput",
        ),
        _seam(
            "graph_runner",
            "worker/graphs.py",
            "GraphRunner",
            "",
            "class(decode_step, max_num_seqs, max_blocks, device): capture(), run(step inputs) -> hidden states, or None if no"
            " graph serves the step",
        ),
        _seam(
            "drafter",
            "spec_decode/ngram.py",
            "NgramDrafter",
            "ngram",
            "class(prompt_lookup_max, prompt_lookup_min): propose(token_ids [n], k) -> at most k token ids; a NumPy array in",
        ),
        _seam(
            "rejection_sampler",
            "sampling/rejection.py",
            "RejectionSampler",
            "greedy, sampling",
            "class(): __call__(logits [N, V], SamplingMetadata, sampler, draft_ids [N], ahead [N]) -> SamplerOutput",
        ),
        _seam(
            "detokenizer",
            "text/detokenizer.py",
            "IncrementalDetokenizer",
            "",
            "class: cls(tokenizer, prompt_token_ids=...), push(token_id) -> str, finish() -> str; skip_special_tokens=False is"
            " passed where a request asks for it",
        ),
    )
}


class Components(Mapping[str, Any]):
    """A set of replaced parts, seam name -> part. What is not in it is the reference.

    Raises ValueError for a name that is no seam, and for a part that cannot be called."""

    def __init__(self, parts: Mapping[str, Any] | None = None) -> None:
        self._parts: dict[str, Any] = {}
        for name, part in (parts or {}).items():
            if name not in SEAMS:
                raise ValueError(f"{name!r} is not a component. Components are: {', '.join(SEAMS)}.")
            if not callable(part):
                raise ValueError(f"Component {name!r} must be a function or a class ({SEAMS[name].contract}), got {part!r}.")
            self._parts[name] = part

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def pick(self, name: str) -> Any:
        """The part for a seam: the replaced one, else the reference."""
        return self._parts[name] if name in self._parts else SEAMS[name].reference()

    def capabilities(self, name: str) -> frozenset[str]:
        seam = SEAMS[name]
        if name not in self._parts:
            return seam.capabilities
        return frozenset(getattr(self._parts[name], "capabilities", seam.capabilities))

    def require(self, name: str, capability: str, asked_for: str | None) -> bool:
        """Whether the part can do `capability`. If not: raises ValueError when `asked_for` says who asked for it explicitly,
        else logs one line and returns False, and the caller switches the feature off."""
        if capability in self.capabilities(name):
            return True
        if asked_for:
            raise ValueError(
                f"{asked_for} needs {capability!r}, which your {name} component ({_describe(self._parts[name])}) does not have."
            )
        logger.info("%s is off: the %s component (%s) does not have it.", capability, name, _describe(self._parts[name]))
        return False

    @classmethod
    def from_dir(cls, folder: str | Path) -> Components:
        """Load the parts found in a folder laid out like `minivllm/` (a student's `my_engine/`).

        A file may define the seam's attribute itself; `sampling/logits.py` may define functions that the reference sampler is
        then built from. Raises FileNotFoundError if there is no such folder, ValueError naming a file that fails to load.
        """
        root = Path(folder)
        if not root.is_dir():
            raise FileNotFoundError(f"No components folder at {root}. Pass the folder that holds core/, sampling/, ...")
        parts: dict[str, Any] = {}
        for seam in SEAMS.values():
            path = seam.file_in(root)
            if path is not None and (part := getattr(load_file(path, root), seam.attribute, None)) is not None:
                parts[seam.name] = part
        logits_file = root / "sampling" / "logits.py"
        if "sampler" not in parts and logits_file.is_file():
            from minivllm.sampling.sampler import sampler_from  # needs torch: only when there is something to build

            parts["sampler"] = sampler_from(load_file(logits_file, root))
        if not parts:
            raise ValueError(
                f"{root} holds none of the component files: {', '.join(sorted({s.file for s in SEAMS.values()}))}."
            )
        return cls(parts)

    def describe(self) -> str:
        """One line a seam: whose part is in use."""
        return "\n".join(f"{n:18} {_describe(self._parts[n]) if n in self._parts else 'minivllm'}" for n in SEAMS)


def _describe(part: Any) -> str:
    return f"{getattr(part, '__module__', '?')}.{getattr(part, '__qualname__', type(part).__name__)}"


def load_file(path: Path, root: Path | None = None) -> ModuleType:
    """Import a file under a name of its own, compiled from its text so that stale bytecode can never run. The name is its path
    from `root`'s folder on ("my_engine.core.block_pool"), which is what logs and error messages show of a part."""
    shown = path.relative_to(root.parent) if root is not None else path
    name = "minivllm_components." + shown.with_suffix("").as_posix().replace("/", ".").strip(".")
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickling look the module up
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"Component file {path} fails to load: {type(error).__name__}: {error}") from error
    return module
