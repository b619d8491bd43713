"""The sampler: what is drawn, from what noise, and that no row feels another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.sampling import sampler as sampler_module
from minivllm.sampling.logits import apply_top_k, apply_top_p
from minivllm.sampling.sampler import INVALID, Sampler, SamplingMetadata, choose, sampler_from, uniform

INF, NAN = float("inf"), float("nan")


def metadata(
    n: int,
    *,
    temperature: float | list[float] = 1.0,
    seeds: int | list[int] | torch.Tensor = 0,
    positions: int | list[int] | torch.Tensor = 0,
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
    **others: object,
) -> SamplingMetadata:
    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return (
            torch.as_tensor(values, dtype=dtype).expand(n)
            if not isinstance(values, list)
            else torch.tensor(values, dtype=dtype)
        )

    temperatures = tensor(temperature, torch.float32)
    return SamplingMetadata(
        temperature=temperatures,
        seeds=tensor(seeds, torch.int64),
        positions=tensor(positions, torch.int64),
        sampled_rows=(temperatures > 0).nonzero()[:, 0],
        top_k=None if top_k is None else tensor(top_k, torch.int64),
        top_p=None if top_p is None else tensor(top_p, torch.float32),
        min_p=None if min_p is None else tensor(min_p, torch.float32),
        **others,  # type: ignore[arg-type]
    )


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed.double() - expected.double()) ** 2 / expected.double()).sum())


# ---------------------------------------------------------------- noise


def splitmix64(seed: int, position: int) -> int:
    """The published generator, in Python's unbounded integers."""
    mask = (1 << 64) - 1

    def output(state: int) -> int:
        z = state & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    return output(output(seed + golden) + (position + 1) * golden)


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63)])
def test_noise_is_the_published_hash_for_seeds_of_all_64_bits(seed: int) -> None:
    positions = [0, 1, 2, 1000, 2**31, 2**40]
    noise = uniform(torch.full((6,), seed), torch.tensor(positions))
    assert noise.tolist() == [(splitmix64(seed, p) >> 11) / 2**53 for p in positions]


@pytest.mark.parametrize("by", ["position", "seed"])
def test_noise_is_uniform_along_positions_and_along_seeds(by: str) -> None:
    n, fixed = torch.arange(200_000), torch.full((200_000,), 7)
    noise = uniform(fixed, n) if by == "position" else uniform(n, fixed)
    assert noise.min() >= 0 and noise.max() < 1
    counts = torch.histc(noise.float(), bins=100, min=0, max=1)
    assert chi_square(counts, torch.full((100,), 2000.0)) < 180  # 99 degrees of freedom: p < 1e-6 above 182


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (2**32, 0), (0, 2**32)])
def test_noise_of_neighbouring_keys_is_independent(seed_step: int, position_step: int) -> None:
    """Pairs fill the unit square evenly."""
    seeds, positions = torch.arange(200_000) // 400, torch.arange(200_000) % 400 + 1
    a, b = uniform(seeds, positions), uniform(seeds + seed_step, positions + position_step)
    cells = torch.bincount((a * 10).long() * 10 + (b * 10).long(), minlength=100)
    assert chi_square(cells, torch.full((100,), 2000.0)) < 180


# ---------------------------------------------------------------- drawing


@pytest.mark.parametrize(
    ("noise", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.299, 1), (0.301, 2), (0.599, 2), (0.601, 3), (1 - 2**-53, 3)]
)
def test_the_draw_inverts_the_cumulative_distribution(noise: float, token: int) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert choose(logits, torch.tensor([noise], dtype=torch.float64)).tolist() == [token]


def test_removed_tokens_are_never_drawn_whatever_the_noise() -> None:
    logits = torch.full((2, 1000), -INF)
    logits[:, 3], logits[:, 700] = 1.0, 5.0
    assert choose(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [3, 700]


def test_removed_tokens_in_between_change_no_draw() -> None:
    logits = torch.randn(500, 6)
    noise = uniform(torch.arange(500), torch.zeros(500, dtype=torch.int64))
    spread = torch.full((500, 60), -INF)
    spread[:, ::10] = logits
    assert torch.equal(choose(spread, noise), choose(logits, noise) * 10)


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_softmax(by: str, temperature: float) -> None:
    n = torch.arange(200_000)
    logits = torch.tensor([0.05, 0.15, 0.2, 0.25, 0.35]).log()
    keys = {"seeds": 11, "positions": n} if by == "position" else {"seeds": n, "positions": 11}
    drawn = Sampler()(logits.expand(len(n), 5), metadata(len(n), temperature=temperature, **keys)).token_ids
    expected = (logits / temperature).softmax(0) * len(n)
    assert chi_square(torch.bincount(drawn, minlength=5), expected) < 35  # 4 degrees of freedom: p < 1e-6 above 33.4


@pytest.mark.parametrize(
    ("settings", "probabilities"),
    [
        ({"top_k": [2]}, [0, 0, 0, 0.25, 0.35]),
        ({"top_p": [0.7]}, [0, 0, 0.2, 0.25, 0.35]),
        ({"min_p": [0.5]}, [0, 0, 0.2, 0.25, 0.35]),
        ({"top_k": [3], "top_p": [0.5]}, [0, 0, 0, 0.25, 0.35]),  # of .25/.8 and .35/.8: the second token crosses .5
    ],
)
def test_draws_follow_what_the_filters_leave(settings: dict[str, list], probabilities: list[float]) -> None:
    n = torch.arange(100_000)
    logits = torch.tensor([0.05, 0.15, 0.2, 0.25, 0.35]).log().expand(len(n), 5)
    repeated = {name: value * len(n) for name, value in settings.items()}
    drawn = Sampler()(logits, metadata(len(n), positions=n, **repeated)).token_ids
    counts, expected = torch.bincount(drawn, minlength=5), torch.tensor(probabilities)
    assert counts[expected == 0].sum() == 0
    expected = expected[expected > 0] / expected.sum() * len(n)
    assert chi_square(counts[counts > 0], expected) < 35


def test_order_is_temperature_then_min_p() -> None:
    """Temperature 2 makes .1, .9 into .25, .75, of which both survive min_p = .2. Before it, the first would not."""
    logits = torch.tensor([[0.1, 0.9]]).log().expand(200, 2)
    drawn = Sampler()(logits, metadata(200, temperature=2.0, min_p=[0.2] * 200, positions=torch.arange(200))).token_ids
    assert set(drawn.tolist()) == {0, 1}


# ---------------------------------------------------------------- rows are on their own

SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 3.0, "top_p": 0.99},  # flat: needs every candidate
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
)


def batch_of(settings: list[dict[str, float]], seeds: list[int], positions: list[int]) -> SamplingMetadata:
    def column(name: str, off: float) -> list:
        return [s.get(name, off) for s in settings]

    return metadata(
        len(settings),
        temperature=column("temperature", 1.0),
        top_k=column("top_k", 0) if any("top_k" in s for s in settings) else None,
        top_p=column("top_p", 1.0) if any("top_p" in s for s in settings) else None,
        min_p=column("min_p", 0.0) if any("min_p" in s for s in settings) else None,
        seeds=seeds,
        positions=positions,
    )


@given(order=st.permutations(range(len(SETTINGS))), take=st.integers(1, len(SETTINGS)), seed=st.integers(-(2**63), 2**63 - 1))
def test_a_row_draws_the_same_alone_and_among_any_others(order: list[int], take: int, seed: int) -> None:
    logits = torch.randn(len(SETTINGS), 6000, generator=torch.Generator().manual_seed(1)) * 2
    chosen = order[:take]
    together = Sampler()(logits[chosen], batch_of([SETTINGS[i] for i in chosen], [seed] * take, [5] * take)).token_ids
    alone = [Sampler()(logits[i : i + 1], batch_of([SETTINGS[i]], [seed], [5])).token_ids.item() for i in chosen]
    assert together.tolist() == alone


@given(data=st.data())
def test_narrowing_to_few_candidates_changes_no_draw(data: st.DataObject) -> None:
    """Against filters over the whole vocabulary, with many ties, and 12 candidates out of 64."""
    settings = [
        {
            "temperature": data.draw(st.sampled_from([0.5, 1.0, 4.0])),
            "top_k": data.draw(st.sampled_from([-1, 0, 1, 2, 3, 4, 7, 16, 17, 64, 100])),
            "top_p": data.draw(st.sampled_from([0.01, 0.3, 0.9, 0.99, 1.0])),
            "min_p": data.draw(st.sampled_from([0.0, 0.05, 0.5])),
        }
        for _ in range(8)
    ]
    seed = data.draw(st.integers(0, 2**31))
    logits = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * 3).round()  # whole numbers: ties everywhere
    batch = batch_of(settings, [seed] * 8, list(range(8)))
    plain = type("Plain", (Sampler,), {"narrows": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "FEW", 12)
        assert torch.equal(Sampler()(logits, batch).token_ids, plain()(logits, batch).token_ids)


@given(data=st.data())
def test_cutting_rows_by_value_is_top_k_then_top_p_token_for_token(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(seed)) * 3
    if data.draw(st.booleans()):
        logits = logits.round()
    logits[
        torch.rand(6, 50, generator=torch.Generator().manual_seed(seed)) < data.draw(st.sampled_from([0.0, 0.5, 0.97]))
    ] = -INF
    top_k = torch.tensor(data.draw(st.lists(st.sampled_from([-1, 0, 1, 2, 5, 49, 50, 99]), min_size=6, max_size=6)))
    top_p = torch.tensor(data.draw(st.lists(st.sampled_from([1e-6, 0.3, 0.9, 0.999999, 1.0]), min_size=6, max_size=6)))
    logits = logits[logits.isfinite().any(-1)]
    top_k, top_p = top_k[: len(logits)], top_p[: len(logits)]
    assert torch.equal(sampler_module._cut(logits, top_k, top_p), apply_top_p(apply_top_k(logits, top_k), top_p))


@pytest.mark.parametrize(("V", "k"), [(64, 1), (64, 4), (63, 4), (6400, 20), (6400, 256)])
def test_the_largest_logits_are_found_among_the_best_columns(V: int, k: int) -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    found = sampler_module._largest(logits, k).sort(dim=-1).values
    assert torch.equal(found, logits.topk(k, dim=-1).indices.sort(dim=-1).values)


# ---------------------------------------------------------------- greedy, broken and masked rows


def test_greedy_takes_the_first_of_equal_maxima_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "uniform", None)
    out = Sampler()(torch.tensor([[1.0, 3, 3], [5, 5, -INF]]), metadata(2, temperature=0.0))
    assert out.token_ids.tolist() == [1, 0]
    assert out.logprobs is None


def test_a_tiny_temperature_is_finite_and_nearly_greedy() -> None:
    logits = torch.randn(64, 1000) * 10
    out = Sampler()(logits, metadata(64, temperature=0.01, positions=torch.arange(64)))
    assert (out.token_ids == logits.argmax(-1)).float().mean() > 0.95


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [None, [0.9] * 6])
def test_unusable_rows_are_told_apart_and_others_are_not_touched(temperature: float, top_p: list[float] | None) -> None:
    logits = torch.randn(6, 600)
    settings = metadata(6, temperature=temperature, top_p=top_p, seeds=3)
    healthy = Sampler()(logits, settings).token_ids
    logits[0] = NAN
    logits[1, 7] = NAN
    logits[2] = -INF
    logits[3, 5] = INF
    out = Sampler()(logits, settings).token_ids
    assert out[:4].tolist() == [INVALID] * 4
    assert torch.equal(out[4:], healthy[4:])


def test_rows_with_one_token_left_give_that_token_at_any_setting() -> None:
    logits = torch.full((3, 500), -INF)
    logits[:, 123] = -1000.0
    out = Sampler()(logits, metadata(3, temperature=[0.0, 1.0, 2.0], top_k=[0, 3, 0], top_p=[1.0, 1.0, 0.5]))
    assert out.token_ids.tolist() == [123] * 3


def test_removed_tokens_do_not_come_greedy_or_drawn() -> None:
    logits = torch.tensor([[0.0, 9, 1], [0, 9, 1]])
    removed = (torch.tensor([0, 1, 1]), torch.tensor([1, 1, 2]))
    out = Sampler()(logits, metadata(2, temperature=[0.0, 1.0], removed=removed))
    assert out.token_ids.tolist() == [2, 0]


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(4, 500).bfloat16()
    settings = metadata(4, temperature=[0.0, 1.0, 0.7, 1.0], top_p=[1.0, 1.0, 0.9, 1.0])
    assert torch.equal(Sampler()(logits, settings).token_ids, Sampler()(logits.float(), settings).token_ids)


# ---------------------------------------------------------------- logprobs


def test_logprobs_are_of_the_raw_logits_with_the_sampled_token_first() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
    asked = {"logprobs_rows": torch.tensor([1]), "num_logprobs": 2, "removed": (torch.tensor([1, 1]), torch.tensor([0, 1]))}
    out = Sampler()(logits, metadata(2, temperature=[1.0, 0.0], **asked))
    assert out.logprobs is not None
    assert out.logprobs.token_ids.tolist() == [[2, 0, 1]]  # 2 is what the mask leaves; the model preferred 0 and 1
    assert out.logprobs.ranks.tolist() == [[3, 1, 2]]
    torch.testing.assert_close(out.logprobs.logprobs.exp(), torch.tensor([[0.2, 0.4, 0.3]]))


def test_zero_logprobs_is_the_sampled_token_alone() -> None:
    out = Sampler()(torch.randn(2, 50), metadata(2, logprobs_rows=torch.tensor([0, 1]), num_logprobs=0))
    assert out.logprobs is not None
    assert out.logprobs.token_ids[:, 0].tolist() == out.token_ids.tolist()
    assert out.logprobs.logprobs.shape == (2, 1)


def test_logprobs_of_a_broken_row_crash_nothing() -> None:
    logits = torch.full((1, 50), NAN)
    out = Sampler()(logits, metadata(1, logprobs_rows=torch.tensor([0]), num_logprobs=3))
    assert out.token_ids.tolist() == [INVALID]


# ---------------------------------------------------------------- parts


def test_a_sampler_is_built_from_the_functions_a_module_has() -> None:
    shapes = []

    def own_top_k(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(logits.shape))
        return apply_top_k(logits, torch.ones_like(k))  # keeps one, whatever was asked

    built = sampler_from(SimpleNamespace(__name__="my_engine.sampling.logits", apply_top_k=own_top_k))
    logits = torch.randn(3, 500)
    out = built()(logits, metadata(3, top_k=[5, 6, 7], top_p=[0.9] * 3))
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()
    assert shapes == [(3, 500)]  # whole rows: nothing was narrowed for a function that may not expect it
    assert built.capabilities == Sampler.capabilities
    assert built.__module__ == "my_engine.sampling.logits"


def test_a_function_that_writes_into_its_input_does_not_reach_the_models_logits() -> None:
    def in_place(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return logits.fill_(0.0)

    built = sampler_from(SimpleNamespace(apply_top_k=in_place))
    logits = torch.randn(2, 50)
    before = logits.clone()
    built()(logits, metadata(2, top_k=[5, 5]))
    assert torch.equal(logits, before)


def test_a_module_without_functions_gives_the_reference() -> None:
    built = sampler_from(SimpleNamespace())
    assert built.narrows
    assert built.apply_top_p is Sampler.apply_top_p
