"""Two small tokenizers, one of each family: GPT-2's byte-level BPE, and SentencePiece-like BPE with byte fallback (Llama 2)."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from minivllm.text.tokenizer import Tokenizer

WORDS = "the quick brown fox jumps over the lazy dog, the fox and the dog. naïve café 日本語 😀 "


def make_byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS] * 3, trainer)
    return Tokenizer(backend, "byte-level", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})


def make_sentencepiece() -> Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,",
        "▁t",
        "▁th",
        "▁the",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("▁t", "h"), ("▁th", "e")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, "sentencepiece", {"bos_token": "<s>", "eos_token": "</s>"})
