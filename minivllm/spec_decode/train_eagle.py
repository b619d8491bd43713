"""Train an EAGLE head for a target model, from nothing: `python -m minivllm.spec_decode.train_eagle`. Labs: shown in Lab 10.

    1. data      our own engine answers seeded prompts; the features of every position are kept, shard by shard
    2. vocabulary   the most frequent tokens of the answers
    3. training  the head is unrolled as it will be used: k passes, each on the features the pass before predicted
    4. result    weights in bfloat16, a card, and the curves of loss and acceptance on held-out prompts

Everything lies in a work folder, and a run that was interrupted goes on where it stopped. The budget is processor time, so that
a busy machine trains for longer and not worse: 90 CPU minutes are 45 minutes on 2 cores.

**Unrolled training.** In use, the second draft is made from the head's own first prediction, not from a feature of the target.
A head that has seen only true features meets inputs there that it does not know; so pass j of training feeds it what pass j - 1
gave (the training-time test of EAGLE-3; HASS, Zhang et al. 2024). `ChainedAttention` has the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from minivllm.config import EngineConfig
from minivllm.llm import LLM
from minivllm.models.decoder import Decoder
from minivllm.models.rope import rotary_table
from minivllm.models.weights import load_model
from minivllm.sampling_params import SamplingParams
from minivllm.spec_decode.eagle import EagleHead, draft_rows
from minivllm.spec_decode.prompts import held_out_prompts, training_prompts
from minivllm.worker.input_batch import StepInputs
from minivllm.worker.model_runner import ModelRunner

SHARD_PROMPTS = 128
MAX_SHARDS = 60
NUM_HELD_OUT = 48
MAX_TOKENS = 160
PASSES = 3  # unrolled, and so drafts a step
PASS_WEIGHT = 0.8  # a later draft counts only if those before it were right
BATCH_TOKENS = 1024
LEARNING_RATE = 1.5e-3
WARM_UP_STEPS = 50
SAVE_EVERY_S = 60.0
EVALUATE_EVERY_S = 240.0


# ---------------------------------------------------------------------- data


class RecordingRunner(ModelRunner):
    """A model runner that keeps the hidden states of every position it computes, by request."""

    features: dict[str, list[torch.Tensor]]

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        hidden = super()._forward(inputs)
        starts = inputs.token_starts
        for i, req_id in enumerate(inputs.req_ids):
            self.features.setdefault(req_id, []).append(hidden[starts[i] : starts[i + 1]].to(torch.bfloat16))
        return hidden


@dataclass
class Sample:
    """One answered prompt of n tokens: token ids [n] and the target's features [n - 1, hidden], of all positions but the
    last."""

    token_ids: torch.Tensor
    features: torch.Tensor
    num_prompt_tokens: int


def make_engine(model: str, num_seqs: int) -> tuple[LLM, RecordingRunner]:
    config = EngineConfig(
        model=model, enable_prefix_caching=False, max_num_seqs=num_seqs, max_num_batched_tokens=1024, max_model_len=1024
    )
    runner = RecordingRunner(config)
    runner.features = {}
    from minivllm.models.hub import resolve_model
    from minivllm.text.tokenizer import Tokenizer

    folder = resolve_model(model)
    llm = LLM.from_executor(
        runner,
        runner.config,
        tokenizer=Tokenizer.from_folder(folder),
        vocab_size=runner.vocab_size,
        model_max_len=runner.max_model_len,
        eos_token_ids=runner.model_config.eos_token_ids,
        model_path=folder,
    )
    return llm, runner


def answer(llm: LLM, runner: RecordingRunner, prompts: Sequence[str], first_index: int, greedy: bool) -> list[Sample]:
    """Answers to chat prompts. Two of three are greedy, the third drawn at temperature 0.8: the head is used for both."""
    runner.features = {}
    params = [
        SamplingParams(temperature=0.0 if greedy or (first_index + i) % 3 else 0.8, seed=first_index + i, max_tokens=MAX_TOKENS)
        for i in range(len(prompts))
    ]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(chats, params, use_tqdm=False)
    # Internal request ids are the user's and a suffix; features are matched by their beginning.
    by_user_id = {req_id.rsplit("-", 1)[0]: torch.cat(parts) for req_id, parts in runner.features.items()}
    samples = []
    for output in outputs:
        assert output.prompt_token_ids is not None
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        features = by_user_id[output.request_id]
        assert len(features) == len(token_ids) - 1
        samples.append(Sample(torch.tensor(token_ids, dtype=torch.int32), features, len(output.prompt_token_ids)))
    return samples


def save_shard(path: Path, samples: Sequence[Sample]) -> None:
    from safetensors.torch import save_file

    tensors = {
        "token_ids": torch.cat([s.token_ids for s in samples]),
        "features": torch.cat([s.features for s in samples]),
        "lengths": torch.tensor([len(s.token_ids) for s in samples]),
        "prompt_lengths": torch.tensor([s.num_prompt_tokens for s in samples]),
    }
    save_file(tensors, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)  # a shard is whole or not there


def load_shard(path: Path) -> list[Sample]:
    from safetensors.torch import load_file

    tensors = load_file(path)
    lengths = tensors["lengths"].tolist()
    token_ids = tensors["token_ids"].split(lengths)
    features = tensors["features"].split([n - 1 for n in lengths])
    return [Sample(*parts) for parts in zip(token_ids, features, tensors["prompt_lengths"].tolist(), strict=True)]


def frequent_tokens(samples: Sequence[Sample], size: int, vocab_size: int, always: Sequence[int]) -> tuple[torch.Tensor, float]:
    """The `size` most frequent token ids of the answers, `always` among them, and the share of the answers they cover."""
    counts = Counter(t for s in samples for t in s.token_ids[s.num_prompt_tokens :].tolist())
    ids = dict.fromkeys([*always, *(t for t, _ in counts.most_common())])
    chosen = [*ids, *(t for t in range(vocab_size) if t not in ids)][:size]  # few data: filled up with the lowest ids
    covered = sum(counts[t] for t in chosen) / max(1, counts.total())
    return torch.tensor(chosen), covered


# ---------------------------------------------------------------------- the unrolled head


class ChainedAttention:
    """Attention of B sequences of L positions, over several passes of the head.

    In use, a chain of drafts that starts at position t reads the keys that true features left at 0..t, and then its own. So in
    pass j the query at position s, which belongs to the chain started at s - j, sees

        keys of pass 0 at 0 .. s - j     and one key of each pass i = 1..j, at s - j + i        (the last one is its own)

    A pass is a call of the layer, which calls this with its q [B * L, H, D] and k, v [B * L, Hkv, D].
    """

    def __init__(self, num_sequences: int) -> None:
        self.B = num_sequences
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, sliding_window: int | None
    ) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, (self.B, -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, L, D]
        k, v = (x.repeat_interleave(group, dim=1).to(q.dtype) for x in (k, v))
        self.keys.append(k)
        self.values.append(v)
        j = len(self.keys) - 1
        return self._chained(q, j, scale).transpose(1, 2).flatten(0, 1)

    def _chained(self, q: torch.Tensor, j: int, scale: float) -> torch.Tensor:
        L = q.shape[2]
        hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1 - j)  # keys after s - j
        scores = (q @ self.keys[0].transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)
        # (plain products: fused attention is slower here, backwards)
        own = [(q * _shift(self.keys[i], j - i)).sum(-1, keepdim=True) * scale for i in range(1, j + 1)]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(q.dtype)
        out = weights[..., :L] @ self.values[0]
        for i in range(1, j + 1):
            out = out + weights[..., L + i - 1, None] * _shift(self.values[i], j - i)
        return out


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    """Move [B, heads, L, D] n positions on; zeros come in."""
    return F.pad(x[:, :, : x.shape[2] - n], (0, 0, n, 0)) if n else x


@dataclass
class Batch:
    """B sequences padded to L positions. At position s the head gets features[s] and the embedding of next_ids[s], and predicts
    next_features[s], which the target says target_ids[s] = x(s + 2) from. `counts` [B, L]: where that is part of an answer."""

    next_ids: torch.Tensor
    features: torch.Tensor
    next_features: torch.Tensor
    target_ids: torch.Tensor
    counts: torch.Tensor


def make_batch(samples: Sequence[Sample]) -> Batch:
    L = max(len(s.token_ids) for s in samples) - 2
    H = samples[0].features.shape[1]
    B = len(samples)
    features, next_features = torch.zeros(2, B, L, H, dtype=torch.bfloat16)
    next_ids, target_ids = torch.zeros(2, B, L, dtype=torch.int64)
    counts = torch.zeros(B, L, dtype=torch.bool)
    for b, s in enumerate(samples):
        n = len(s.token_ids) - 2
        features[b, :n], next_features[b, :n] = s.features[:n], s.features[1 : n + 1]
        next_ids[b, :n], target_ids[b, :n] = s.token_ids[1 : n + 1], s.token_ids[2 : n + 2]
        counts[b, max(PASSES, s.num_prompt_tokens) - 1 : n] = True  # so late that every pass's chain has begun in the sequence
    return Batch(next_ids, features, next_features, target_ids, counts)


def unroll(head: EagleHead, embedding: torch.Tensor, batch: Batch, passes: int = PASSES) -> Iterator[torch.Tensor]:
    """The predicted features [B, L, H] of each pass."""
    B, L = batch.next_ids.shape
    cos, sin = rotary_table(torch.arange(L).repeat(B), head.frequencies, embedding.dtype)
    embeds = F.embedding(batch.next_ids.flatten(), embedding)
    attend = ChainedAttention(B)
    features = batch.features
    for _ in range(passes):
        predicted = head(embeds, features.flatten(0, 1), cos, sin, attend).unflatten(0, (B, L))
        yield predicted
        features = F.pad(predicted[:, :-1], (0, 0, 1, 0))  # what was predicted at s is the next pass's feature at s + 1


def losses(head: EagleHead, embedding: torch.Tensor, rows: torch.Tensor, batch: Batch, passes: int) -> torch.Tensor:
    """Mean cross-entropy [passes] between what the target says, over the draft vocabulary, and what each pass does."""
    with torch.no_grad():
        target = F.linear(batch.next_features[batch.counts], rows).float().softmax(-1)
    total = []
    for predicted in unroll(head, embedding, batch, passes):
        logits = F.linear(predicted[batch.counts], rows).float()
        total.append(F.cross_entropy(logits, target))
    return torch.stack(total)


@torch.no_grad()
def acceptance(head: EagleHead, embedding: torch.Tensor, rows: torch.Tensor, batches: Sequence[Batch]) -> list[float]:
    """The share of chains whose first 1, 2, .. PASSES drafts are all what the target said: greedy acceptance by position.
    embedding [vocab_size, hidden]; rows [draft_vocab, hidden], the output matrix's of the tokens a head can say."""
    right, chains = torch.zeros(PASSES), 0
    for batch in batches:
        alive = None
        starts = batch.counts.clone()
        starts[:, -(PASSES - 1) :] = False
        starts[:, : -(PASSES - 1)] &= batch.counts[:, PASSES - 1 :]  # chains with all their tokens known
        for j, predicted in enumerate(unroll(head, embedding, batch)):
            drafts = head.draft_token_ids[F.linear(predicted, rows).argmax(-1)]
            hits = (drafts == batch.target_ids).roll(-j, dims=1)  # seen from where the chain started
            alive = hits & starts if alive is None else alive & hits
            right[j] += alive.sum()
        chains += int(starts.sum())
    return [round(float(r) / max(1, chains), 4) for r in right]


# ---------------------------------------------------------------------- the run


@dataclass
class Progress:
    """What a run has done so far; kept as JSON beside the checkpoint."""

    data_s: float = 0.0
    train_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    coverage: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)  # step, cpu seconds, loss by pass, held-out acceptance


class Training:
    """A head and its optimizer. embedding: the target's [vocab_size, hidden].   rows: those of its output matrix that the head
    can say [draft_vocab, hidden].   loss: by pass, smoothed over steps."""

    def __init__(self, head: EagleHead, embedding: torch.Tensor, rows: torch.Tensor) -> None:
        self.head, self.embedding, self.rows = head, embedding, rows
        self.loss: list[float] = []
        self._parameters = [tensor.requires_grad_() for tensor in head.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05, fused=True
        )

    def step(self, batch: Batch, passes: int, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with torch.autocast("cpu", torch.bfloat16):
            by_pass = losses(self.head, self.embedding, self.rows, batch, passes)
        weights = torch.tensor([PASS_WEIGHT**j for j in range(len(by_pass))])
        (by_pass * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 0.5)
        self._optimizer.step()
        self._optimizer.zero_grad()
        found = by_pass.detach().tolist()
        if len(self.loss) != len(found):  # the first step, or the first with this many passes
            self.loss = found
        self.loss = [0.98 * a + 0.02 * b for a, b in zip(self.loss, found, strict=True)]

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part")
        torch.save({"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


class Run:
    """One training run in a work folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.progress = Progress()
        if (self.work / "progress.json").is_file():
            self.progress = Progress(**json.loads((self.work / "progress.json").read_text(encoding="utf-8")))

    def save_progress(self) -> None:
        part = self.work / "progress.part"
        part.write_text(json.dumps(self.progress.__dict__, indent=1), encoding="utf-8")
        os.replace(part, self.work / "progress.json")

    # ---------------------------------------------------------------- 1. data

    def generate(self) -> None:
        """Shards of answers until the data's share of the budget is used up. Held-out ones come first."""
        budget = self.args.cpu_minutes * 60 * self.args.data_share
        held_out = self.work / "held_out.safetensors"
        if held_out.is_file() and self.progress.data_s >= budget:
            return
        llm, runner = make_engine(self.args.model, SHARD_PROMPTS)
        if not held_out.is_file():
            save_shard(held_out, answer(llm, runner, held_out_prompts(NUM_HELD_OUT), 0, greedy=True))
        prompts = training_prompts(SHARD_PROMPTS * MAX_SHARDS, self.args.seed)
        bar = _bar("data", budget, self.progress.data_s)
        for i in range(MAX_SHARDS):
            path = self.work / f"shard_{i:03}.safetensors"
            if path.is_file():
                continue
            if self.progress.data_s >= budget:
                break
            start = time.process_time()
            first = i * SHARD_PROMPTS
            samples = answer(llm, runner, prompts[first : first + SHARD_PROMPTS], first, greedy=False)
            save_shard(path, samples)
            self.progress.data_s += time.process_time() - start
            bar(self.progress.data_s, f"{i + 1} shards of {SHARD_PROMPTS} answers")
            self.save_progress()
        llm.shutdown()

    # ---------------------------------------------------------------- 2. and 3. vocabulary, training

    def train(self) -> None:
        """Steps until training's share of the budget is used up, from the checkpoint on if there is one."""
        args, progress = self.args, self.progress
        torch.manual_seed(args.seed)
        samples = [s for path in sorted(self.work.glob("shard_*.safetensors")) for s in load_shard(path)]
        held_out = [make_batch(part) for part in _packed(load_shard(self.work / "held_out.safetensors"))]
        training = self._prepare(samples)
        budget = args.cpu_minutes * 60 * (1 - args.data_share)
        bar = _bar("train", budget, progress.train_s)
        batches = _forever(samples, args.seed, progress.steps)
        last = saved = evaluated = time.process_time()
        while progress.train_s < budget:
            batch, share = next(batches), progress.train_s / budget
            training.step(batch, num_passes(share), LEARNING_RATE * schedule(progress.steps, share))
            now = time.process_time()
            progress.train_s, last = progress.train_s + now - last, now
            progress.steps += 1
            progress.tokens += int(batch.counts.sum())
            bar(progress.train_s, f"step {progress.steps}, loss " + " ".join(f"{x:.3f}" for x in training.loss))
            is_over = progress.train_s >= budget
            if is_over or now - evaluated >= EVALUATE_EVERY_S:
                evaluated = now
                self._evaluate(training, held_out)
                last = time.process_time()  # measuring is not training
            if is_over or now - saved >= SAVE_EVERY_S:
                saved = now
                training.save(self.work / "checkpoint.pt")
                self.save_progress()

    def _prepare(self, samples: Sequence[Sample]) -> Training:
        """A new head, or the checkpoint's."""
        target = load_model(self.args.model, dtype=torch.bfloat16)
        ids_path = self.work / "draft_token_ids.json"
        if not ids_path.is_file():  # fixed from here on: the checkpoint's columns mean these ids
            ids, self.progress.coverage = frequent_tokens(
                samples, self.args.draft_vocab_size, target.config.vocab_size, target.config.eos_token_ids
            )
            ids_path.write_text(json.dumps(ids.tolist()), encoding="utf-8")
        head = new_head(target, torch.tensor(json.loads(ids_path.read_text(encoding="utf-8"))))
        rows = draft_rows(head, target.logits, torch.bfloat16, torch.device("cpu"))
        training = Training(head, target.embed_tokens.detach(), rows)
        if (self.work / "checkpoint.pt").is_file():
            training.load(self.work / "checkpoint.pt")
        return training

    def _evaluate(self, training: Training, batches: Sequence[Batch]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            accepted = acceptance(training.head, training.embedding, training.rows, batches)
        entry = {
            "step": self.progress.steps,
            "cpu_s": round(self.progress.train_s, 1),
            "loss": [round(x, 4) for x in training.loss],
            "acceptance": accepted,
            "tokens_per_step": round(1 + sum(accepted), 3),
        }
        self.progress.curve.append(entry)
        print(f"\n{entry}", file=sys.stderr, flush=True)

    # ---------------------------------------------------------------- 4. result

    def export(self) -> Path:
        """The head in bfloat16, measured in the engine on held-out prompts, with its card and curves. Returns the folder."""
        folder = self.work / "head"
        target = load_model(self.args.model, dtype=torch.bfloat16)
        ids = torch.tensor(json.loads((self.work / "draft_token_ids.json").read_text(encoding="utf-8")))
        head = EagleHead(target.config, ids, torch.float32)
        head.load_state_dict(torch.load(self.work / "checkpoint.pt", weights_only=True)["head"])
        head.save(folder, target=self.args.model, steps=self.progress.steps, seed=self.args.seed)
        measured = measure(self.args.model, folder)
        num_answers = len(list(self.work.glob("shard_*.safetensors"))) * SHARD_PROMPTS
        text = card(self.args, self.progress, measured, len(ids), num_answers)
        (folder / "README.md").write_text(text, encoding="utf-8")
        (folder / "curve.json").write_text(json.dumps(self.progress.curve, indent=1) + "\n", encoding="utf-8")
        draw_curves(self.progress.curve, folder / "curves.png")
        return folder


def measure(model: str, head: Path) -> dict[str, Any]:
    """What the head is worth in the engine: held-out chat prompts, greedy and at temperature 0.8, k = PASSES."""
    found: dict[str, Any] = {}
    settings = {"method": "eagle", "model": str(head), "num_speculative_tokens": PASSES}
    with LLM(model, dtype="bfloat16", speculative_config=settings, max_num_seqs=16, max_model_len=1024) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in held_out_prompts(NUM_HELD_OUT)]
        for name, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
            stats = llm.spec_decode_stats
            assert stats is not None
            stats.reset()
            llm.chat(chats, SamplingParams(temperature=temperature, seed=0, max_tokens=MAX_TOKENS), use_tqdm=False)
            found[name] = {
                "acceptance": [round(share, 3) for share in stats.acceptance],
                "tokens_per_step": round(stats.tokens_per_step, 3),
                "verifications": stats.num_verifications,
            }
    return found


def card(args: argparse.Namespace, progress: Progress, measured: dict[str, Any], vocab: int, num_answers: int) -> str:
    """The head's card, in Markdown."""
    rows = ""
    for name, found in measured.items():
        shares = " | ".join(f"{share:.1%}" for share in found["acceptance"])
        rows += f"| {name} | {shares} | {found['tokens_per_step']:.2f} | {found['verifications']} |\n"
    heads = " | ".join(f"draft {j + 1}" for j in range(PASSES))
    return f"""# EAGLE head for {args.model}

One decoder layer that drafts for {args.model} in minivllm:
`LLM("{args.model}", speculative_config={{"method": "eagle", "num_speculative_tokens": {PASSES}}})`.
Drafts are verified: the head changes the speed of the answers, never their distribution.

- **Input**: the target's hidden state after its final norm, and the embedding of the next token. **Output**: a prediction of
  the next hidden state; drafts come from {vocab} rows of the target's own embedding, those of the most frequent tokens of the
  training data ({progress.coverage:.1%} of its answers' tokens). The embedding is not in this file.
- **Data**: {num_answers:,} answers of the target itself to prompts from `minivllm/spec_decode/prompts.py` (seed
  {args.seed}), two thirds greedy and one third at temperature 0.8, at most {MAX_TOKENS} tokens each. No other text.
- **Training**: {progress.steps} steps, {progress.tokens:,} predicted positions, {progress.train_s / 60:.0f} CPU minutes, after
  {progress.data_s / 60:.0f} CPU minutes for the data; AdamW, learning rate {LEARNING_RATE} on half a cosine, unrolled 1, 2,
  then {PASSES} passes.
- **Again**: `python -m minivllm.spec_decode.train_eagle --model {args.model}` (its default budget is 90 CPU minutes)
- **Licence**: Apache-2.0, as the target's weights and this project.

Measured in the engine, bfloat16, on {NUM_HELD_OUT} held-out chat prompts (neither their templates nor their subjects were
trained on). A draft counts as accepted if all before it were, too; tokens per verification include the target's own.

| | {heads} | tokens per verification | verifications |
|---|{"---|" * PASSES}---|---|
{rows}
![Over CPU minutes of training: the loss of each pass falls and flattens, the share of drafts accepted rises](curves.png)
"""


def draw_curves(curve: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss and held-out acceptance over CPU minutes; without matplotlib, curve.json has the numbers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("No curves.png: pip install matplotlib", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    minutes = [entry["cpu_s"] / 60 for entry in curve]
    for j, style in enumerate(("-o", "--s", ":^", "-.D")[:PASSES]):
        having = [(m, e["loss"][j]) for m, e in zip(minutes, curve, strict=True) if len(e["loss"]) > j]
        left.plot(*zip(*having, strict=True), style, label=f"pass {j + 1}")
        right.plot(minutes, [entry["acceptance"][j] for entry in curve], style, label=f"draft {j + 1}")
    left.set(xlabel="CPU minutes of training", ylabel="loss (training)")
    right.set(xlabel="CPU minutes of training", ylabel="accepted, with all before it (held out)", ylim=(0, 1))
    left.legend()
    right.legend()
    figure.savefig(path, dpi=120)


def new_head(target: Decoder, draft_token_ids: torch.Tensor) -> EagleHead:
    """A head to be trained, in float32, that says draft_token_ids [draft_vocab]. Its layer starts as the target's last one: it
    already reads the residual stream and writes what the output matrix understands. Its input starts as the feature plus a
    little of the embedding."""
    head = EagleHead(target.config, draft_token_ids, torch.float32)
    H = target.config.hidden_size
    with torch.no_grad():
        last = dict(target.layers[-1].checkpoint_tensors())
        for name, tensor in head.layer.checkpoint_tensors():
            tensor.copy_(last[name])
        head.fc.weight.normal_(0, 0.02)
        head.fc.weight[:, H:] += torch.eye(H)
        head.fc.weight[:, :H] += torch.eye(H)
        head.norm.copy_(target.norm)
        head.feature_norm.fill_(1.0)
    return head


def num_passes(share: float) -> int:
    """One pass until half of the budget is used, for it costs half of three and the later ones build on it; then two; then
    all."""
    return 1 if share < 0.5 else min(2, PASSES) if share < 0.7 else PASSES


def schedule(step: int, share: float) -> float:
    """Learning rate by the share of the budget that is used: a short warm-up, then half a cosine to a twentieth."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def _packed(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Batches of samples of like lengths, about BATCH_TOKENS positions each."""
    batches: list[list[Sample]] = [[]]
    for sample in sorted(
        (s for s in samples if len(s.token_ids) - s.num_prompt_tokens > PASSES), key=lambda s: len(s.token_ids)
    ):
        if batches[-1] and (len(batches[-1]) + 1) * len(sample.token_ids) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(sample)
    return batches


def _forever(samples: Sequence[Sample], seed: int, skip: int) -> Iterator[Batch]:
    """Batches in an order drawn anew each epoch; the first `skip` were seen before an interruption."""
    packed = _packed(samples)
    rng = random.Random(seed)
    while True:
        rng.shuffle(packed)
        for part in packed:
            if skip > 0:
                skip -= 1
                continue
            yield make_batch(part)


def _bar(what: str, total: float, done: float) -> Any:
    """show(seconds done, words): a progress bar of a budget of CPU seconds, on stderr."""
    from tqdm import tqdm

    bar = tqdm(total=round(total), initial=round(done), desc=what, unit="s", mininterval=2.0, leave=True)

    def show(seconds: float, words: str) -> None:
        bar.n = min(round(seconds), bar.total)
        bar.set_postfix_str(words, refresh=False)
        bar.update(0)

    return show


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minivllm.spec_decode.train_eagle", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", default="smollm2-135m", help="the target (default %(default)s)")
    parser.add_argument("--work", default="eagle-work", help="folder for data and checkpoints (default %(default)s)")
    parser.add_argument("--cpu-minutes", type=float, default=90.0, help="processor time in all (default %(default)s)")
    parser.add_argument("--data-share", type=float, default=0.35, help="share of it for making data (default %(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=6144, help="tokens the head can draft (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    run = Run(args)
    run.generate()
    if run.progress.train_s < args.cpu_minutes * 60 * (1 - args.data_share) or not (run.work / "checkpoint.pt").is_file():
        run.train()
    folder = run.export()
    print(f"The head, its card and its curves are in\n{folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
