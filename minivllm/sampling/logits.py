"""What happens to a row of logits before a token is drawn. Lab 02 builds `apply_temperature`, `apply_top_k` and `apply_top_p`.

Pure functions, [B, V] float32 in, a new [B, V] out, one setting a row; -inf marks a removed token, and a row whose setting is
"off" comes back as it was. The sampler applies them in the order of this file. They work on any set of candidates: V need not
be the vocabulary, which is how the sampler avoids sorting all of it. (The first four are about token ids, so they see whole
rows.) May not know requests.
"""

from __future__ import annotations

import torch

from minivllm.sampling_params import GREEDY_EPS

REMOVED = float("-inf")


def keep_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`allowed_token_ids`: of each row that is in rows, only the tokens token_ids[i] with rows[i] stay."""
    kept = logits.index_fill(0, rows, REMOVED)
    return kept.index_put((rows, token_ids), logits[rows, token_ids])


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Remove token token_ids[i] from row rows[i], for every i (`bad_words`: a text's last token where the others stand before;
    `min_tokens`: the end tokens while the output is too short)."""
    return logits.index_put((rows, token_ids), logits.new_full((), REMOVED))


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`logit_bias`: add bias[i] to token token_ids[i] of row rows[i]. A removed token stays removed."""
    return logits.index_put((rows, token_ids), bias, accumulate=True)


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Make tokens that have come before less likely (more, with a negative penalty, or a repetition penalty below 1).

    token_ids [B, N]: each row's prompt and output, padded with V.   is_output [B, N]: which of them are output.
    repetition [B]: the logits of tokens seen are divided by it if positive, multiplied if negative (Keskar et al. 2019, CTRL).
    frequency, presence [B]: taken off for each time a token is in the output, and once if it is (OpenAI's definition).
    """
    V = logits.shape[-1]
    counts = logits.new_zeros(len(logits), V + 1)  # the last column takes the padding
    is_seen = torch.zeros_like(counts, dtype=torch.bool).scatter_(1, token_ids, True)[:, :V]
    counts = counts.scatter_add_(1, token_ids, is_output.to(counts.dtype))[:, :V]
    repetition = repetition[:, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_seen, scaled, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide each row by its temperature [B]. A greedy row (temperature < 1e-5) is left alone: its argmax is what counts."""
    return logits / torch.where(temperature < GREEDY_EPS, 1.0, temperature)[:, None]


def apply_min_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Remove tokens less probable than p [B] times the most probable one. 0 is off.

    prob_i < p * prob_max is logit_i < logit_max + log(p): no softmax needed.
    """
    threshold = logits.amax(-1, keepdim=True) + p.log()[:, None]
    return logits.masked_fill(logits < threshold, REMOVED)


def apply_top_k(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep each row's k [B] largest logits; k <= 0 or k >= V is off. Tokens that tie with the k-th stay, so that the outcome
    does not depend on how equal numbers happen to be sorted."""
    V = logits.shape[-1]
    on = (k > 0) & (k < V)
    k = torch.where(on, k, 1)
    widest = int(k.max()) if logits.is_cpu else V  # elsewhere the host would have to wait for the number
    kth = logits.topk(widest, dim=-1).values.gather(-1, (k - 1)[:, None])
    return logits.masked_fill((logits < kth) & on[:, None], REMOVED)


def apply_top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep each row's smallest set of most probable tokens whose probabilities add up to at least p [B]; p >= 1 is off.

    A token stays if the tokens before it, most probable first, add up to less than p: so the one that crosses the line stays,
    and there is always one. [.1, .2, .3, .4] at p = .6 keeps {.3, .4}. Of equal logits the lower token id comes first.
    """
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = sorted_logits.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    removed = (mass_before >= p[:, None]) & (p < 1.0)[:, None]
    return logits.masked_fill(removed.scatter(-1, order, removed), REMOVED)
