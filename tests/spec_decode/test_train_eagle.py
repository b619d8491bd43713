"""Training an EAGLE head: what is trained is what is used, and what is measured was never trained on."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minivllm.attention.naive import causal_attention
from minivllm.models.decoder import Decoder
from minivllm.models.rope import rotary_table
from minivllm.models.weights import load_config, load_model
from minivllm.spec_decode import train_eagle
from minivllm.spec_decode.eagle import SHIPPED, EagleHead, draft_rows
from minivllm.spec_decode.prompts import HELD_OUT_TEMPLATES, SUBJECTS, TEMPLATES, held_out_prompts, training_prompts
from minivllm.spec_decode.train_eagle import (
    PASSES,
    Run,
    Sample,
    acceptance,
    frequent_tokens,
    load_shard,
    losses,
    make_batch,
    new_head,
    save_shard,
    schedule,
    unroll,
)
from tests.spec_decode.harness import save_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_model(str(save_model(tmp_path_factory.mktemp("model"))), dtype=torch.float32, load_format="dummy")


@pytest.fixture
def head(target: Decoder) -> EagleHead:
    torch.manual_seed(0)
    made = new_head(target, torch.arange(40))
    with torch.no_grad():
        made.fc.weight.normal_(0, 0.2)
    return made


def sample(target: Decoder, length: int, num_prompt_tokens: int, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 101, (length,), generator=generator)
    features = target.run_layers(F.embedding(ids, target.embed_tokens), torch.arange(length), causal_attention)[:-1]
    return Sample(ids.int(), features.to(torch.bfloat16), num_prompt_tokens)


@torch.no_grad()
def test_each_pass_computes_what_a_chain_of_drafts_would(target: Decoder, head: EagleHead) -> None:
    """Pass j at position s is the (j + 1)-th step of a chain that started at s - j with the target's features before it."""
    samples = [sample(target, 9, 3, seed=1), sample(target, 7, 2, seed=2)]
    batch = make_batch(samples)
    batch.features = batch.features.float()
    by_pass = list(unroll(head, target.embed_tokens, batch))
    for b, s in enumerate(samples):
        ids, true = s.token_ids.long(), s.features.float()
        for start in range(len(ids) - 2 - PASSES):
            features = list(true[: start + 1])
            for j in range(PASSES):
                n = start + j + 1
                cos, sin = rotary_table(torch.arange(n), head.frequencies, torch.float32)
                embeds = F.embedding(ids[1 : n + 1], target.embed_tokens)
                predicted = head(embeds, torch.stack(features), cos, sin, causal_attention)[-1]
                torch.testing.assert_close(by_pass[j][b, start + j], predicted, atol=2e-4, rtol=1e-3)
                features.append(predicted)


def test_a_batch_predicts_answers_only_and_pads_with_nothing_that_counts(target: Decoder) -> None:
    batch = make_batch([sample(target, 12, 5, seed=1), sample(target, 9, 6, seed=2)])
    assert batch.counts.shape == (2, 10)
    assert batch.counts[0].nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8, 9]  # token 6, the second of the answer, and on
    assert batch.counts[1].nonzero()[:, 0].tolist() == [5, 6]
    ids = sample(target, 12, 5, seed=1).token_ids
    assert batch.next_ids[0].tolist() == ids[1:11].tolist()
    assert batch.target_ids[0].tolist() == ids[2:].tolist()


def test_a_few_steps_lower_the_loss(target: Decoder, head: EagleHead) -> None:
    batch = make_batch([sample(target, 14, 4, seed=s) for s in range(4)])
    rows = draft_rows(head, target.logits, torch.float32, torch.device("cpu"))
    parameters = [tensor.requires_grad_() for tensor in head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    found = []
    for _ in range(25):
        with torch.autocast("cpu", torch.bfloat16):
            by_pass = losses(head, target.embed_tokens, rows, batch, PASSES)
        by_pass.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(by_pass.detach().sum()))
    assert len(by_pass) == PASSES
    assert found[-1] < 0.8 * found[0]


def test_acceptance_counts_a_draft_only_behind_right_ones(target: Decoder, head: EagleHead) -> None:
    batch = make_batch([sample(target, 20, 4, seed=s) for s in range(6)])
    rows = draft_rows(head, target.logits, torch.float32, torch.device("cpu"))
    accepted = acceptance(head, target.embed_tokens, rows, [batch])
    assert len(accepted) == PASSES
    assert all(1 >= a >= b >= 0 for a, b in pairwise(accepted))


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers() -> None:
    answer = torch.tensor([9, 9, 9, 7, 7, 7, 7, 5, 3, 3])
    data = [Sample(torch.cat([torch.tensor([1, 1, 1, 1, 1, 1]), answer]).int(), torch.zeros(15, 4), 6)]
    ids, covered = frequent_tokens(data, 4, 20, always=[2])
    assert ids.tolist() == [2, 7, 9, 3]
    assert covered == 0.9
    assert frequent_tokens(data, 8, 20, always=[2])[0].tolist() == [2, 7, 9, 3, 5, 0, 1, 4]


def test_a_shard_comes_back_as_it_was(tmp_path: Path, target: Decoder) -> None:
    samples = [sample(target, 12, 5, seed=1), sample(target, 9, 6, seed=2)]
    save_shard(tmp_path / "shard_000.safetensors", samples)
    for before, after in zip(samples, load_shard(tmp_path / "shard_000.safetensors"), strict=True):
        assert torch.equal(before.token_ids, after.token_ids)
        assert torch.equal(before.features, after.features)
        assert before.num_prompt_tokens == after.num_prompt_tokens


def test_a_head_comes_back_as_it_was_but_for_bfloat16(tmp_path: Path, target: Decoder, head: EagleHead) -> None:
    head.save(tmp_path / "head", target="tiny")
    loaded = EagleHead.load(tmp_path / "head", target.config, torch.float32)
    assert torch.equal(loaded.draft_token_ids, head.draft_token_ids)
    for (name, mine), (_, theirs) in zip(head.named_tensors(), loaded.named_tensors(), strict=True):
        assert torch.equal(mine.to(torch.bfloat16).float(), theirs), name
    (tmp_path / "head" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="damaged or cut short"):
        EagleHead.load(tmp_path / "head", target.config, torch.float32)


def test_the_head_that_ships_fits_smollm2_and_is_small() -> None:
    config = load_config("smollm2-135m", load_format="dummy")
    head = EagleHead.load(SHIPPED, config, torch.bfloat16)
    assert 2 in head.draft_token_ids  # the end token: else no answer's end is ever drafted
    assert len(head.draft_token_ids.unique()) == len(head.draft_token_ids)
    assert all(tensor.isfinite().all() for _, tensor in head.named_tensors())
    assert (SHIPPED / "model.safetensors").stat().st_size < 12e6
    assert "Licence" in (SHIPPED / "README.md").read_text(encoding="utf-8")


def test_held_out_prompts_share_no_template_and_no_subject_with_training_ones() -> None:
    assert not set(TEMPLATES) & set(HELD_OUT_TEMPLATES)
    assert len(set(SUBJECTS)) == len(SUBJECTS)
    held_out = SUBJECTS[::8]
    texts = training_prompts(2000)
    assert len(set(texts)) == 2000
    assert texts[:100] == training_prompts(100)
    assert training_prompts(50, seed=1) != texts[:50]
    assert not [text for text in texts for subject in held_out if subject in text]
    assert len(set(held_out_prompts(100))) == 100


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    assert schedule(0, 0.0) < 0.05
    assert schedule(1000, 0.0) == 1.0
    assert schedule(1000, 1.0) == pytest.approx(0.05)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(save_model(tmp_path / "model")), dtype=torch.bfloat16, load_format="dummy")
    monkeypatch.setattr(train_eagle, "load_model", lambda *_, **__: model)
    for name in ("held_out", "shard_000"):
        save_shard(tmp_path / f"{name}.safetensors", [sample(target, 12, 4, seed=i) for i in range(3)])
    args = argparse.Namespace(model="", work=str(tmp_path), seed=0, draft_vocab_size=40, data_share=0.0, cpu_minutes=0.01)
    Run(args).train()
    steps, head = Run(args).progress.steps, torch.load(tmp_path / "checkpoint.pt", weights_only=True)["head"]
    assert steps > 0 and len(Run(args).progress.curve) == 1
    args.cpu_minutes = 0.02
    Run(args).train()
    assert Run(args).progress.steps > steps and len(Run(args).progress.curve) == 2
    assert not torch.equal(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["head"]["fc.weight"], head["fc.weight"])
