"""Drafters with a KV cache of their own: the cache is right whatever the schedule, which shows in what they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minivllm.attention.naive import causal_attention
from minivllm.models.rope import rotary_table
from minivllm.models.weights import load_model
from minivllm.spec_decode.drafting import Progress
from minivllm.spec_decode.eagle import EagleDrafter, EagleHead
from tests.spec_decode.harness import GREEDY, SHAPES, make_runner, many_prompts, run, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(model: Path) -> Path:
    """A random head, which drafts from a third of the vocabulary."""
    target = load_model(str(model), dtype=torch.float32, load_format="dummy")
    torch.manual_seed(1)
    made = EagleHead(target.config, torch.randperm(101)[:33], torch.float32)
    with torch.no_grad():
        for _, tensor in made.named_tensors():  # memory that nobody has filled yet
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3)
    made.save(model / "head")
    return model / "head"


# ---------------------------------------------------------------- draft model


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_model_equal_to_the_target_is_always_right(model: Path, shape: str) -> None:
    """One wrong or missing key in its cache, and a draft would be another."""
    settings = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    plain = run(make_runner(model, **SHAPES[shape]), many_prompts())
    runner = make_runner(model, speculative_config=settings, **SHAPES[shape])
    assert run(runner, many_prompts(), stagger=2) == plain
    stats = runner.speculation.stats
    assert stats.accepted == stats.drafted
    assert stats.num_verifications > 10


def test_a_draft_model_that_is_often_wrong_changes_nothing(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", num_hidden_layers=1, num_key_value_heads=4, hidden_size=32, head_dim=32)
    settings = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 4}
    for shape in ("plain", "preemption and chunks"):
        plain = run(make_runner(model, **SHAPES[shape]), many_prompts())
        runner = make_runner(model, speculative_config=settings, **SHAPES[shape])
        assert run(runner, many_prompts()) == plain
        assert sum(runner.speculation.stats.accepted) < sum(runner.speculation.stats.drafted)


def test_a_draft_model_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", vocab_size=64)
    with pytest.raises(ValueError, match="has 64 tokens in its vocabulary, the target 101"):
        make_runner(model, speculative_config={"method": "draft_model", "model": str(other), "num_speculative_tokens": 2})


def test_the_drafters_layers_are_counted_in_a_blocks_bytes(model: Path) -> None:
    settings: dict[str, Any] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    plain = make_runner(model, **settings)
    drafting = make_runner(
        model, speculative_config={"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}, **settings
    )
    assert drafting.num_blocks == plain.num_blocks // 2


# ---------------------------------------------------------------- EAGLE


class DenseHead:
    """The head over a whole sequence at once, without a cache: what `EagleDrafter` must draft."""

    def __init__(self, model: Path, folder: Path, k: int) -> None:
        self.target = load_model(str(model), dtype=torch.float32, load_format="dummy")
        self.head = EagleHead.load(folder, self.target.config, torch.float32)
        self.rows = F.linear(torch.eye(64), self.target.lm_head.weight)[:, self.head.draft_token_ids].T
        self.k = k
        self.closest = float("inf")  # of all drafts, by how much the best row was better than the next

    @torch.inference_mode()
    def drafts(self, token_ids: list[int]) -> list[int]:
        positions = torch.arange(len(token_ids))
        embeds = F.embedding(torch.tensor(token_ids), self.target.embed_tokens)
        features = list(self.target.run_layers(embeds, positions, causal_attention)[:-1])
        ids = list(token_ids)
        for _ in range(self.k):
            n = len(ids) - 1
            cos, sin = rotary_table(torch.arange(n), self.head.frequencies, torch.float32)
            embeds = F.embedding(torch.tensor(ids[1:]), self.target.embed_tokens)
            predicted = self.head(embeds, torch.stack(features), cos, sin, causal_attention)[-1]
            best, second = (self.rows @ predicted).topk(2).values.tolist()
            self.closest = min(self.closest, best - second)
            ids.append(int(self.head.draft_token_ids[(self.rows @ predicted).argmax()]))
            features.append(predicted)
        return ids[len(token_ids) :]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_eagle_heads_drafts_are_those_of_the_whole_sequence_computed_anew(
    model: Path, head: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    propose = EagleDrafter.propose

    def spy(self: EagleDrafter, progress: Progress) -> list[list[int]]:
        chains = propose(self, progress)
        for row, chain in zip(progress.gained_rows, chains, strict=True):
            seen.append((progress.batch.token_ids[row, : progress.batch.num_tokens[row]].tolist(), chain))
        return chains

    monkeypatch.setattr(EagleDrafter, "propose", spy)
    settings = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    plain = run(make_runner(model, **SHAPES[shape]), many_prompts())
    runner = make_runner(model, speculative_config=settings, **SHAPES[shape])
    assert run(runner, many_prompts(), stagger=2) == plain
    dense = DenseHead(model, head, 3)
    longest = runner.batch.token_ids.shape[1]
    checked = [(known, chain) for known, chain in seen if len(known) + 3 < longest]  # no room for drafts beyond
    assert len(checked) > 50
    for known, chain in checked:
        assert chain == dense.drafts(known)
    assert dense.closest > 1e-3  # logits of about 3 in float32: rounding decides nothing here


def test_an_eagle_head_leaves_the_prefix_cache_its_hits(model: Path, head: Path) -> None:
    settings = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    prompt = many_prompts()[5]
    for use in (None, settings):
        runner = make_runner(model, speculative_config=use)
        found: list[int] = []
        submit = runner.submit

        def spy(step: Any, submit: Any = submit, found: list[int] = found) -> None:
            found.extend(new.num_computed_tokens for new in step.scheduled_new_reqs)
            submit(step)

        runner.submit = spy  # type: ignore[method-assign]
        run(runner, [prompt, prompt], GREEDY, stagger=3)
        assert found == [0, 20]


def test_a_head_of_another_size_is_refused_by_name(model: Path, head: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", hidden_size=32)
    settings = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="The head was trained for another model"):
        make_runner(other, speculative_config=settings)
    with pytest.raises(ValueError, match="holds no EAGLE head"):
        make_runner(model, speculative_config={**settings, "model": str(tmp_path)})
    with pytest.raises(ValueError, match="ships with minivllm is for smollm2-135m"):
        make_runner(model, speculative_config={"method": "eagle", "num_speculative_tokens": 2})
