"""Sampler: from a batch's logits to one token a row. Lab 02 builds the functions it calls (`logits.py`). May not know
requests.

    allowed, bad, bias, min_tokens, penalties -> temperature -> min_p -> top_k -> top_p -> draw     (float32)
                                          '-> argmax: greedy rows

**Noise without state.** A row's random number is a hash of its request's seed and of the position of the token to draw
(`uniform`). There is no generator to advance, so neither neighbours, batch size, preemption nor a step in flight can change
what a seed yields.

**One number a row.** A token is drawn by inverting the cumulative distribution at that number. An exponential race (Gumbel-max)
is as exact but needs a hash for every token of the vocabulary: 1.5 million at 32 rows, ten times the cost of all the rest. The
price of inversion is a cumulative sum, whose rounding could depend on its order; so weights are integers, and the sum is exact.

**Few candidates.** torch sorts a vocabulary in 4 ms a row on a CPU. top_k and top_p keep few tokens, so they are applied to the
most probable 256 where that provably gives the same answer, else by value over the whole row (`_cut`). Whether it does is
decided for each row by the row alone: a request's tokens never depend on its neighbours' settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from minivllm.sampling import logits as reference

INVALID = -1  # instead of a token: the row's logits are NaN, infinite, or all removed
FEW = 256
CPU_SLICE = 1 << 18  # numbers, 1 MB of float32
FUNCTIONS = ("apply_temperature", "apply_min_p", "apply_top_k", "apply_top_p")


@dataclass(slots=True)
class Penalties:
    """Of the R rows that have any: `logits.apply_penalties`' arguments, [R, N] and [R]."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    is_output: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(slots=True)
class SamplingMetadata:
    """What each of B rows asks for. Tensors [B] on the logits' device; a filter that no row uses is None.

    seeds, positions: int64, the key of each row's noise; a position is the index of the token being drawn in its sequence.
    sampled_rows: int64, the rows that draw; the others are greedy.
    allowed, removed, bias: (rows, token ids, and numbers for bias), as `keep_tokens`, `mask_tokens`, `add_bias` take them.
    penalties: None where no row has any.
    logprobs_rows: the rows that want log-probabilities, `num_logprobs` top tokens each (the most any of them wants).
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    sampled_rows: torch.Tensor
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    removed: tuple[torch.Tensor, torch.Tensor] | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    penalties: Penalties | None = None
    logprobs_rows: torch.Tensor | None = None
    num_logprobs: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether any row's logits are changed before its argmax is taken. False in almost every step."""
        return not (self.allowed is None and self.removed is None and self.bias is None and self.penalties is None)

    def of(self, rows: torch.Tensor | slice) -> SamplingMetadata:
        """The settings of some rows that draw."""

        def pick(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[rows]

        temperature = self.temperature[rows]
        return SamplingMetadata(
            temperature=temperature,
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            sampled_rows=torch.arange(len(temperature), device=temperature.device),
            min_p=pick(self.min_p),
            top_k=pick(self.top_k),
            top_p=pick(self.top_p),
        )


@dataclass(slots=True)
class Logprobs:
    """Of the R rows that asked: the sampled token first, then the top ones. All [R, 1 + num_logprobs]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


@dataclass(slots=True)
class SamplerOutput:
    """token_ids [B] int64, INVALID where the logits were unusable. On the logits' device: nothing has waited for it yet."""

    token_ids: torch.Tensor
    logprobs: Logprobs | None = None


class Sampler:
    """The reference sampler. Its four logits functions are attributes: a subclass replaces the ones it brings."""

    capabilities = frozenset(
        {"temperature", "top_k", "top_p", "min_p", "logprobs", "penalties", "logit_bias", "allowed_token_ids", "bad_words"}
    )
    apply_temperature = staticmethod(reference.apply_temperature)
    apply_min_p = staticmethod(reference.apply_min_p)
    apply_top_k = staticmethod(reference.apply_top_k)
    apply_top_p = staticmethod(reference.apply_top_p)
    narrows = True  # top_k and top_p may be shown the most probable tokens only

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """logits [B, V] as the model made them, in any dtype: they are widened to float32 before anything is computed."""
        changed = change_logits(logits, metadata) if metadata.changes_logits else logits
        rows = metadata.sampled_rows
        if len(rows) == 0:  # all greedy
            best, token_ids = best_tokens(changed)
        elif len(rows) == len(logits):  # nobody needs the argmax
            best, token_ids = changed.amax(dim=-1), self.draw(changed, metadata)
        else:
            best, token_ids = best_tokens(changed)
            token_ids = token_ids.index_copy(0, rows, self.draw(changed[rows], metadata.of(rows)))
        token_ids = token_ids.masked_fill(~best.isfinite(), INVALID)  # a maximum is NaN if any number is
        return SamplerOutput(token_ids, self.logprobs(logits, token_ids, metadata))

    def draw(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """A token id for every row of logits [R, V]. On a CPU a few rows at a time, which stay in its cache."""
        R, V = logits.shape
        step = max(1, CPU_SLICE // V) if logits.is_cpu else R
        parts = [self._draw(logits[i : i + step].float(), metadata.of(slice(i, i + step))) for i in range(0, R, step)]
        return torch.cat(parts)

    def _draw(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        noise = uniform(metadata.seeds, metadata.positions)
        logits = self.apply_temperature(logits if self.narrows else logits.clone(), metadata.temperature)
        if metadata.min_p is not None:
            logits = self.apply_min_p(logits, metadata.min_p)
        if metadata.top_k is None and metadata.top_p is None:
            return choose(logits, noise)
        if self.narrows and logits.is_cpu:  # elsewhere a sort is cheap, and a decision about data makes the host wait
            return self._draw_from_candidates(logits, metadata, noise)
        if metadata.top_k is not None:
            logits = self.apply_top_k(logits, metadata.top_k)
        if metadata.top_p is not None:
            logits = self.apply_top_p(logits, metadata.top_p)
        return choose(logits, noise)

    def _draw_from_candidates(self, logits: torch.Tensor, metadata: SamplingMetadata, noise: torch.Tensor) -> torch.Tensor:
        """`draw` from min_p on, each row among as few candidates as its own settings and logits allow."""
        R, V = logits.shape
        top_k = torch.zeros(R, dtype=torch.int64) if metadata.top_k is None else metadata.top_k
        top_p = torch.ones(R) if metadata.top_p is None else metadata.top_p
        top_k = torch.where(top_k < V, top_k, 0)
        token_ids = torch.empty(R, dtype=torch.int64)
        unfiltered = (top_k <= 0) & (top_p >= 1)
        if (rows := unfiltered.nonzero()[:, 0]).numel():
            token_ids[rows] = choose(logits[rows], noise[rows])
        left = (~unfiltered).nonzero()[:, 0]
        if left.numel() and V > FEW:
            candidates, ids, p, proven = _most_probable(logits[left], FEW, top_k[left], top_p[left])
            if (done := left[proven]).numel():
                kept = self.apply_top_p(self.apply_top_k(candidates[proven], top_k[done]), p[proven])
                token_ids[done] = ids[proven].gather(-1, choose(kept, noise[done])[:, None])[:, 0]
            left = left[~proven]
        if left.numel():
            token_ids[left] = choose(_cut(logits[left], top_k[left], top_p[left]), noise[left])
        return token_ids

    def probs(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """The distribution [R, V] that `draw` draws from, for those who need more of it than a token."""
        logits = self.apply_temperature(logits.float().clone(), metadata.temperature)
        if metadata.min_p is not None:
            logits = self.apply_min_p(logits, metadata.min_p)
        if metadata.top_k is not None:
            logits = self.apply_top_k(logits, metadata.top_k)
        if metadata.top_p is not None:
            logits = self.apply_top_p(logits, metadata.top_p)
        return logits.softmax(dim=-1)

    @staticmethod
    def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, metadata: SamplingMetadata) -> Logprobs | None:
        """Of the raw logits [B, V]: what the model says, before masks, temperature and filters. token_ids [B] were sampled."""
        rows = metadata.logprobs_rows
        if rows is None:
            return None
        logprobs_RV = logits[rows].float().log_softmax(dim=-1)
        return top_logprobs(logprobs_RV, token_ids[rows].clamp(min=0), metadata.num_logprobs)


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit and its token id [B]; NaN is larger than any number. On a CPU NumPy looks for it, in half of
    torch's time."""
    if not logits.is_cpu:
        best, token_ids = logits.max(dim=-1)
        return best, token_ids
    step = max(1, CPU_SLICE // logits.shape[-1])
    parts = [logits[i : i + step].float().numpy().argmax(axis=-1) for i in range(0, max(1, len(logits)), step)]
    token_ids = torch.from_numpy(np.concatenate(parts))
    return logits.gather(-1, token_ids[:, None])[:, 0], token_ids


def change_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """What requests ask about single tokens, [B, V] -> a new float32 [B, V]. The order of masks and bias makes no difference:
    what is removed stays so."""
    logits = logits.float()
    if metadata.allowed is not None:
        logits = reference.keep_tokens(logits, *metadata.allowed)
    if metadata.removed is not None:
        logits = reference.mask_tokens(logits, *metadata.removed)
    if metadata.bias is not None:
        logits = reference.add_bias(logits, *metadata.bias)
    if (p := metadata.penalties) is not None:
        penalized = reference.apply_penalties(logits[p.rows], p.token_ids, p.is_output, p.repetition, p.frequency, p.presence)
        logits = logits.index_copy(0, p.rows, penalized)
    return logits


def top_logprobs(logprobs: torch.Tensor, chosen: torch.Tensor, num_logprobs: int) -> Logprobs:
    """Of each row of logprobs [R, V]: the chosen token [R] first, then the `num_logprobs` most probable ones, with ranks."""
    chosen_R1 = chosen[:, None]
    chosen_logprobs_R1 = logprobs.gather(-1, chosen_R1)
    rank_R1 = (logprobs > chosen_logprobs_R1).sum(dim=-1, keepdim=True) + 1
    top_ids = _largest(logprobs, min(num_logprobs, logprobs.shape[-1])).sort(dim=-1).values
    values, order = logprobs.gather(-1, top_ids).sort(dim=-1, descending=True, stable=True)
    top_ids = top_ids.gather(-1, order)
    top_ranks = torch.arange(1, top_ids.shape[-1] + 1, device=logprobs.device).expand_as(top_ids)
    return Logprobs(
        torch.cat([chosen_R1, top_ids], dim=-1),
        torch.cat([chosen_logprobs_R1, values], dim=-1),
        torch.cat([rank_R1, top_ranks], dim=-1),
    )


def _most_probable(
    logits: torch.Tensor, width: int, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Narrow rows [R, V] to their `width` most probable tokens, in order of token id. Returns

    candidates, ids [R, width]: logits and where they come from.
    p [R]: what top_p is among these. The candidates hold a share m of the row's probability, so p of the whole is p / m of
        them. (Where top_k is on, top_p is about what top_k leaves, which is all here.)
    proven [R]: whether no token left out can matter. Logits equal to the smallest candidate are no candidates then: some of
        their equals may have been left out, and top_k keeps all of a tie or none. (If the smallest is a removed token, then
        every other one left out is, too.)
    """
    ids = _largest(logits, width).sort(dim=-1).values
    values = logits.gather(-1, ids)
    smallest = values.amin(dim=-1)
    candidates = values.masked_fill(values <= smallest[:, None], reference.REMOVED)
    by_k = top_k > 0
    proven = (smallest == reference.REMOVED) | (by_k & (top_k <= candidates.isfinite().sum(dim=-1)))
    if by_k.all():
        return candidates, ids, top_p, proven
    share = logits.softmax(dim=-1).gather(-1, ids).masked_fill(candidates == reference.REMOVED, 0.0).sum(dim=-1)
    return candidates, ids, torch.where(by_k, top_p, top_p / share), proven | (~by_k & (share >= top_p))


def _cut(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`apply_top_p(apply_top_k(logits, top_k), top_p)`, token for token, in a tenth of the time: values alone are sorted, which
    NumPy does with vector instructions, and rows are then cut at a value. Only tokens that tie with it are looked at one by
    one.
    """
    R, V = logits.shape
    values = torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    kth = values.gather(-1, torch.where((top_k > 0) & (top_k < V), top_k, V)[:, None] - 1)
    if (top_k > 0).any():
        values = values.masked_fill_(values < kth, reference.REMOVED)
    probs = values.softmax(dim=-1)
    num_kept = (probs.cumsum(dim=-1) - probs < top_p[:, None]).sum(dim=-1).clamp(min=1)
    num_kept = torch.where(top_p < 1.0, num_kept, V)
    last = torch.maximum(values.gather(-1, num_kept[:, None] - 1), kth)
    kept = logits > last
    room = num_kept - kept.sum(dim=-1)
    rows, ids = ((logits == last) & last.isfinite()).nonzero(as_tuple=True)  # the ties, by row and token id
    place_in_row = torch.arange(len(rows)) - torch.searchsorted(rows, torch.arange(R))[rows]
    stays = place_in_row < room[rows]
    kept[rows[stays], ids[stays]] = True
    return logits.masked_fill(~kept, reference.REMOVED)


def _largest(logits: torch.Tensor, k: int, rows: int = 16) -> torch.Tensor:
    """Indices [R, k] of each row's k largest logits, in any order: `topk`, in a third of its time for a small k.

    Lay the vocabulary out as a table of 16 rows. The k largest numbers stand in the k columns with the largest maxima, so only
    these 16 k numbers need to be ranked. (Of several equal to the smallest of the k, any may be among them.)
    """
    R, V = logits.shape
    columns = V // rows
    if V % rows or columns < 4 * k:
        return logits.topk(k, dim=-1, sorted=False).indices
    table = logits.view(R, rows, columns)
    best_columns = table.amax(dim=1).topk(k, dim=-1, sorted=False).indices
    contenders = table.gather(2, best_columns[:, None, :].expand(R, rows, k)).flatten(1)
    place = contenders.topk(k, dim=-1, sorted=False).indices
    return place // k * columns + best_columns.gather(-1, place % k)


def choose(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw an index from softmax(logits) [R, C] with one uniform number in [0, 1) per row: the first index whose cumulative
    weight exceeds noise * total.

    Weights are integers, in units of 2^-40 of the largest: their sums are exact (below 2^58 for 2^18 tokens), in whatever
    order a device adds, and the same with removed tokens in between or without. A token that weighs 0 is never drawn, for its
    cumulative weight is its predecessor's.
    """
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp_().mul_(2.0**40).to(torch.int64)
    cumulative = torch.cumsum(
        weights, dim=-1, out=weights
    )  # in place: at [32, 49152] fresh memory would cost more than the sums
    total = cumulative[:, -1]
    target = (noise * total).to(torch.int64).clamp(max=total - 1)  # the product may round up
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp(max=logits.shape[-1] - 1)  # rows without a finite maximum: any index will do


# The 64-bit arithmetic of `uniform` wraps around, as torch's integers do. Constants: SplitMix64 (Steele, Lea, Flood, "Fast
# splittable pseudorandom number generators", OOPSLA 2014), written as signed numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1), float64 with 53 random bits, for each pair of int64 (seed, position): a function, not a generator.

    It is output `position` of SplitMix64 started at a hash of the seed (so that seeds 1, 2, 3 do not give shifted copies of one
    stream).
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function: every input bit flips every output bit with probability near one half."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift in zeros. torch's >> shifts in copies of the sign, its integers being signed."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sampler_from(module: ModuleType | Any) -> type[Sampler]:
    """A sampler class that takes `apply_temperature`, `apply_min_p`, `apply_top_k` and `apply_top_p` from `module` where it has
    them, and the reference's elsewhere. A replaced top_k or top_p sees whole rows of the vocabulary, as its contract says."""
    own = {name: staticmethod(getattr(module, name)) for name in FUNCTIONS if hasattr(module, name)}
    name = getattr(module, "__name__", "?")
    narrows = not own.keys() & {"apply_top_k", "apply_top_p"}
    return type("Sampler", (Sampler,), {**own, "narrows": narrows, "__module__": name, "__doc__": f"Built from {name}."})
