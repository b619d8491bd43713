"""The operator recorder has a CUDA graph's three properties: memory, not names; no Python; results where they were."""

from __future__ import annotations

import pytest
import torch

from minivllm.worker.operator_graph import OperatorGraph


def record(run):
    graph = OperatorGraph()
    with torch.inference_mode(), graph.capture():
        out = run()
    return graph, out


def test_a_replay_reads_what_the_recorded_memory_holds_now() -> None:
    x = torch.tensor([1.0, 2.0])
    graph, out = record(lambda: (x * 2).sum())
    assert out == 6
    x.copy_(torch.tensor([5.0, 7.0]))
    graph.replay()
    assert out == 24


def test_a_replay_with_a_new_tensor_returns_yesterdays_answer() -> None:
    x = torch.tensor([1.0, 2.0])

    def step():
        return x * 2

    graph, out = record(step)
    x = torch.tensor([5.0, 7.0])
    graph.replay()
    assert out.tolist() == [2, 4]


def test_python_is_not_replayed() -> None:
    x, calls = torch.tensor([3.0]), []

    def step():
        calls.append(1)
        return x + 1 if x.item() > 0 else x - 1

    graph, out = record(step)
    x.fill_(-3)
    graph.replay()
    assert len(calls) == 1
    assert out == -2  # the branch of then


def test_views_are_not_copied_and_copies_are() -> None:
    """`reshape` is a view of one and a copy of the other."""
    x = torch.arange(6.0).view(2, 3)
    graph, (view, copy) = record(lambda: (x.reshape(6), x.t().reshape(6)))
    x.add_(10)
    graph.replay()
    assert view.tolist() == [10, 11, 12, 13, 14, 15]
    assert copy.tolist() == [10, 13, 11, 14, 12, 15]


def test_writes_into_memory_are_replayed() -> None:
    cache, x, slots = torch.zeros(4), torch.tensor([1.0]), torch.tensor([2])
    graph, _ = record(lambda: cache.index_copy_(0, slots, x))
    x.fill_(9)
    slots.fill_(3)
    graph.replay()
    assert cache.tolist() == [0, 0, 1, 9]


def test_operators_with_several_results() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0]])
    graph, (values, indices) = record(lambda: x.sort(dim=-1))
    x.copy_(torch.tensor([[1.0, 9.0, 5.0]]))
    graph.replay()
    assert values.tolist() == [[1, 5, 9]] and indices.tolist() == [[0, 2, 1]]


def test_what_was_recorded_can_be_read() -> None:
    x = torch.ones(2)
    graph, _ = record(lambda: torch.relu(x).add_(1))
    assert [operation.name for operation in graph.operations] == ["aten.relu.default", "aten.add_.Tensor"]


def test_a_second_recording_is_refused() -> None:
    x = torch.ones(2)
    graph, _ = record(lambda: x + 1)
    with pytest.raises(RuntimeError, match="recorded already"), graph.capture():
        pass
