"""The decoder gives transformers' logits for every family, with and without a paged cache."""

from __future__ import annotations

import pytest
import torch

from minivllm.attention.naive import NAIVE
from minivllm.models.decoder import decoder_layer
from minivllm.models.layers import rms_norm
from minivllm.models.registry import ModelConfig
from minivllm.models.weights import load_model

from .conftest import FAMILIES, MakeModel, make_metadata, paged_logits, relative_error

TOLERANCE = 1e-5


def token_ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 101, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", FAMILIES)
def test_full_forward_equals_transformers(make_model: MakeModel, kind: str) -> None:
    folder, reference = make_model(kind)
    prompt = token_ids(41)
    with torch.inference_mode():
        expected = reference(prompt[None]).logits[0]
    assert relative_error(load_model(folder, dtype=torch.float32).full_forward(prompt), expected) < TOLERANCE


@pytest.mark.parametrize("kind", FAMILIES)
def test_paged_chunks_of_a_batch_equal_full_forward(make_model: MakeModel, kind: str) -> None:
    decoder = load_model(make_model(kind)[0], dtype=torch.float32)
    prompts = [token_ids(n, seed=n) for n in (1, 4, 9, 23)]
    for logits, prompt in zip(paged_logits(decoder, prompts, chunks=[5, 1, 1, 3]), prompts, strict=True):
        assert relative_error(logits, decoder.full_forward(prompt)) < TOLERANCE


def test_attention_goes_through_the_backend_that_is_set(make_model: MakeModel) -> None:
    decoder = load_model(make_model()[0], dtype=torch.float32)
    expected = paged_logits(decoder, [token_ids(9)], chunks=[4])
    decoder.attention_backend = NAIVE
    assert relative_error(paged_logits(decoder, [token_ids(9)], chunks=[4])[0], expected[0]) < TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(make_model: MakeModel, kind: str) -> None:
    folder, reference = make_model(kind)
    prompt = token_ids(64)
    with torch.inference_mode():
        exact = reference(prompt[None]).logits[0]
        theirs = (reference.bfloat16()(prompt[None]).logits[0].float() - exact).abs().mean()
    ours = load_model(folder, dtype=torch.bfloat16).full_forward(prompt)
    assert ours.dtype is torch.bfloat16
    assert (ours.float() - exact).abs().mean() < 1.2 * theirs


def test_inputs_embeds_stand_in_for_token_ids(make_model: MakeModel) -> None:
    decoder = load_model(make_model()[0], dtype=torch.float32)
    config, prompt, positions = decoder.config, token_ids(5), torch.arange(5)
    meta = make_metadata([0], [5], torch.tensor([[1, 2]], dtype=torch.int32))
    caches = [torch.zeros(2, 3, 4, config.num_kv_heads, config.head_dim) for _ in range(3)]
    by_ids = decoder(prompt, positions, caches, meta)
    by_embeds = decoder(None, positions, caches, meta, inputs_embeds=decoder.embed_tokens[prompt])
    assert torch.equal(by_ids, by_embeds)
    with pytest.raises(ValueError, match="one of them"):
        decoder(prompt, positions, caches, meta, inputs_embeds=decoder.embed_tokens[prompt])


def test_aux_layers_return_the_residual_stream_as_it_enters_them(make_model: MakeModel) -> None:
    folder, reference = make_model()
    decoder, prompt = load_model(folder, dtype=torch.float32), token_ids(6)
    config = decoder.config
    meta = make_metadata([0], [6], torch.tensor([[1, 2]], dtype=torch.int32))
    caches = [torch.zeros(2, 3, 4, config.num_kv_heads, config.head_dim) for _ in range(3)]
    hidden, aux = decoder(prompt, torch.arange(6), caches, meta, aux_layers=(0, 2, 3))
    with torch.inference_mode():
        theirs = reference(prompt[None], output_hidden_states=True).hidden_states  # the last one is normed
    assert torch.equal(aux[0], decoder.embed_tokens[prompt])
    assert relative_error(aux[1], theirs[2][0]) < TOLERANCE
    assert torch.equal(rms_norm(aux[2], decoder.norm, config.rms_norm_eps), hidden)
    with pytest.raises(ValueError, match=r"aux_layers=\[4\] must lie in 0..3"):
        decoder(prompt, torch.arange(6), caches, meta, aux_layers=(4,))


def test_logits_are_computed_for_the_rows_passed_in_only(make_model: MakeModel) -> None:
    decoder = load_model(make_model()[0], dtype=torch.float32)
    assert decoder.logits(torch.zeros(2, 64)).shape == (2, 101)


def test_the_lab_s_layer_computes_what_the_packed_layer_computes(make_model: MakeModel) -> None:
    decoder, prompt = load_model(make_model("llama, tied")[0], dtype=torch.float32), token_ids(17)
    with torch.inference_mode():
        x = decoder.embed_tokens[prompt]
        for i in range(decoder.config.num_layers):
            x = decoder_layer(x, decoder.layer_weights(i), torch.arange(17))
        logits = decoder.logits(rms_norm(x, decoder.norm, decoder.config.rms_norm_eps))
    assert relative_error(logits, decoder.full_forward(prompt)) < TOLERANCE


def test_layer_weights_are_views_and_refuse_what_the_lab_s_layer_does_not_compute(make_model: MakeModel) -> None:
    decoder = load_model(make_model("llama")[0], dtype=torch.float32)
    assert decoder.layer_weights(0).k_proj.data_ptr() == decoder.layers[0].qkv_proj.weight[64].data_ptr()
    decoder = load_model(make_model("qwen2, windows from layer 1")[0], dtype=torch.float32)
    with pytest.raises(ValueError, match="this Qwen2ForCausalLM has biases and a sliding window"):
        decoder.layer_weights(1)


def test_an_untied_model_has_a_head_of_its_own(make_model: MakeModel) -> None:
    assert load_model(make_model("llama")[0], dtype=torch.float32).lm_head is not None
    folder, _ = make_model("llama, tied")
    assert load_model(folder, dtype=torch.float32).lm_head is None
    assert ModelConfig.from_folder(folder).tie_word_embeddings
