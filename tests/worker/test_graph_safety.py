"""The check that finds, without a GPU, what a CUDA graph's capture would reject: planted faults, and the real decode step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from minivllm.attention import gpu, reference
from minivllm.models.decoder import Decoder
from minivllm.models.registry import ModelConfig
from minivllm.sampling.sampler import Sampler
from minivllm.worker.gpu_memory import costliest_sampling
from minivllm.worker.graph_safety import GraphSafetyError, check_graph_safe, find_faults
from minivllm.worker.graphs import DecodeBuffers, decode_step

X = torch.randn(4, 5)
MASK = torch.tensor([True, False, True, False])
COUNTS = torch.tensor([1, 2, 1, 1])
MADE_OUTSIDE = torch.ones(4, 5)


def in_python_if():
    return X * 2 if X.sum() > 0 else X


FAULTS: list[tuple[str, str, Callable[[], object]]] = [
    ("host read", "item", lambda: X[0, 0].item()),
    ("host read", "tolist", lambda: X.tolist()),
    ("host read", "numpy", lambda: X.numpy()),
    ("host read", "__bool__", in_python_if),
    ("host read", "__int__", lambda: int(COUNTS.max())),
    ("host read", "__float__", lambda: float(X.max())),
    ("host read", "__format__", lambda: f"{X}"),
    ("host read", "__repr__", lambda: repr(X)),
    ("host read", "equal", lambda: torch.equal(X, X)),
    ("host copy", "tensor", lambda: X + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])),
    ("host copy", "new_tensor", lambda: X + X.new_tensor(1.0)),
    ("host copy", "cpu", lambda: X.cpu()),
    ("host copy", "to", lambda: X.to("cpu")),
    ("host copy", "lift_fresh", lambda: torch.from_numpy(np.ones(5, dtype=np.float32)) + X),
    ("data-dependent shape", "nonzero", lambda: X.nonzero()),
    ("data-dependent shape", "nonzero", lambda: torch.where(X > 0)),
    ("data-dependent shape", "index", lambda: X[MASK]),
    ("data-dependent shape", "masked_select", lambda: X.masked_select(X > 0)),
    ("data-dependent shape", "repeat_interleave", lambda: X.repeat_interleave(COUNTS, dim=0)),
    ("data-dependent shape", "_unique2", lambda: COUNTS.unique()),
    ("fresh input", "add", lambda: X + MADE_OUTSIDE),
    ("wait", "torch.cuda.synchronize", lambda: torch.cuda.synchronize()),
]


@pytest.mark.parametrize(
    ("kind", "call", "run"), FAULTS, ids=[f"{kind} {call} {i}" for i, (kind, call, _) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_named(kind: str, call: str, run: Callable[[], object]) -> None:
    faults = find_faults(run, [X, MASK, COUNTS])
    assert [(fault.kind, fault.call) for fault in faults] == [(kind, call)]
    assert faults[0].where.startswith("test_graph_safety.py:")


def test_all_faults_are_listed_with_their_lines() -> None:
    def step():
        n = X.sum().item()
        rows = X[MASK]
        return rows * n

    with pytest.raises(GraphSafetyError) as caught:
        check_graph_safe(step, [X, MASK])
    assert [fault.code for fault in caught.value.faults] == ["n = X.sum().item()", "rows = X[MASK]"]
    assert "host read: item at test_graph_safety.py" in str(caught.value)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.where(X > 0, X, 0.0) + torch.zeros(4, 5) + torch.arange(5),
        lambda: X[COUNTS - 1] * X.reshape(5, 4).t().reshape(4, 5),
        lambda: X.repeat_interleave(COUNTS, dim=0, output_size=5),
        lambda: X.clone().masked_fill_(X > 0, 1.0).view(-1).to(torch.float16),
        lambda: X.clone().index_put_((MASK,), torch.zeros(())),
    ],
)
def test_what_capture_accepts_is_accepted(run: Callable[[], object]) -> None:
    check_graph_safe(run, [X, MASK, COUNTS])


def test_an_error_of_the_code_itself_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        check_graph_safe(lambda: 1 / 0, [X])


def test_the_inside_of_our_own_operators_is_watched() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())]

    operator = torch.library.custom_op(
        "minivllm::test_reads_inside", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    faults = find_faults(lambda: operator(X), [X], bodies={"minivllm::test_reads_inside": body})
    assert [fault.code for fault in faults] == ["return x[: int(x.sum().item())]"]


# ---------------------------------------------------------------- the real decode step, on tensors without numbers

CONFIGS = {
    "llama": ModelConfig("LlamaForCausalLM", 101, 64, 96, 2, 9, 3, 64, 128),
    "qwen3": ModelConfig("Qwen3ForCausalLM", 101, 64, 96, 2, 4, 2, 64, 128, qk_norm=True, tie_word_embeddings=True),
    "mistral": ModelConfig("MistralForCausalLM", 101, 64, 96, 2, 4, 2, 64, 128, sliding_window=(7, 7)),
    "qwen2": ModelConfig("Qwen2ForCausalLM", 101, 64, 96, 2, 4, 2, 64, 128, attention_bias=True),
}


def real_step(
    config: ModelConfig, backend=gpu.TRITON, num_rows: int = 8
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """The decode step that is captured on a GPU, and everything in it that stays where it is."""
    model = Decoder(config, torch.float16, "meta")
    model.attention_backend = backend
    shape = (2, 9, 16, config.num_kv_heads, config.head_dim)
    kv_caches = [torch.empty(shape, dtype=torch.float16, device="meta") for _ in range(config.num_layers)]
    buffers = DecodeBuffers.allocate(num_rows, 4, "meta")
    static = [*model.parameters(), *model.buffers(), *kv_caches, *buffers.tensors()]
    return torch.inference_mode()(partial(decode_step, model, kv_caches, buffers)), static


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_decode_step_can_be_captured(config: ModelConfig, num_rows: int) -> None:
    pytest.importorskip("triton")
    check_graph_safe(*real_step(config, num_rows=num_rows))


def test_a_whole_sequence_can_be_captured_too() -> None:
    """Lab 09 records one, to show what a replay reads."""
    model, ids = Decoder(CONFIGS["llama"], torch.float16, "meta"), torch.empty(5, dtype=torch.int64, device="meta")
    check_graph_safe(lambda: model.full_forward(ids), [*model.parameters(), *model.buffers(), ids])


def test_a_fault_in_the_triton_launcher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as asking the device for the longest sequence, to cut histories into parts."""
    kernels = pytest.importorskip("minivllm.attention.triton_kernels")
    launch = kernels.paged_decode

    def asks(q, kv_cache, block_tables, seq_lens, **options):
        longest = int(seq_lens.max())
        return launch(q, kv_cache, block_tables[:, :longest], seq_lens, **options)

    monkeypatch.setattr(kernels, "paged_decode", asks)
    faults = find_faults(*real_step(CONFIGS["llama"]))
    assert [(fault.kind, fault.code) for fault in faults] == [("host read", "longest = int(seq_lens.max())")]


def test_a_cache_that_is_not_the_recorded_one_is_found() -> None:
    pytest.importorskip("triton")
    run, static = real_step(CONFIGS["llama"])
    caches = [tensor for tensor in static if tensor.dim() == 5]
    assert {fault.kind for fault in find_faults(run, [t for t in static if t is not caches[1]])} == {"fresh input"}


def test_a_part_that_loops_over_slots_is_found() -> None:
    def write_kv(key, value, kv_cache, slot_mapping):
        for token, slot in enumerate(slot_mapping.tolist()):
            kv_cache[0].view(-1, *key.shape[1:])[slot] = key[token]

    run, static = real_step(CONFIGS["llama"], dataclasses.replace(reference.REFERENCE, write_kv=write_kv))
    faults = find_faults(run, static)
    assert [(fault.kind, fault.call) for fault in faults] == [("host read", "tolist")]


def test_sampling_never_makes_the_host_wait() -> None:
    """It is not captured, but one wait a step is the rule: here too nothing is read back."""
    logits, metadata = torch.empty(4, 101, device="meta"), costliest_sampling(4, torch.device("meta"))
    metadata.removed = (torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta"))
    metadata.logprobs_rows, metadata.num_logprobs = torch.zeros(2, dtype=torch.int64, device="meta"), 5
    static = [value for value in (logits, *vars_of(metadata)) if isinstance(value, torch.Tensor)]
    check_graph_safe(lambda: Sampler()(logits, metadata), [*static, *metadata.removed])


def vars_of(metadata: object) -> list[object]:
    return [getattr(metadata, field.name) for field in dataclasses.fields(metadata)]
