"""Filling a decoder from safetensors, or with random numbers. Nothing is guessed: a tensor that is missing, left over or of the
wrong shape is an error that names it.

Files are memory-mapped and copied tensor by tensor into the packed parameters: loading takes the model's size and little more.
Labs: built by none. May not know requests or the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minivllm.models.decoder import Decoder
from minivllm.models.hub import resolve_model
from minivllm.models.registry import KNOWN_CONFIGS, ModelConfig, read_json

_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16", "F64")  # as safetensors writes them


def load_config(model: str | Path, *, load_format: str = "auto") -> ModelConfig:
    """The ModelConfig of a model name, see `resolve_model`. With load_format="dummy" nothing is fetched: `model` is a folder
    with at least a config.json, or one of KNOWN_CONFIGS."""
    if load_format != "dummy":
        return ModelConfig.from_folder(_folder(model, load_format))
    if Path(model).is_dir():
        return ModelConfig.from_folder(model)
    if str(model) in KNOWN_CONFIGS:
        return KNOWN_CONFIGS[str(model)]
    raise ValueError(
        f"load_format='dummy' needs a config, and {str(model)!r} has none here. Give a folder with a config.json, or one of:"
        f" {', '.join(KNOWN_CONFIGS)}."
    )


def load_model(
    model: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
) -> Decoder:
    """A decoder with its weights, on `device` in `dtype`.

    load_format: "auto"; "safetensors" or "gguf" to insist on one; "dummy" for random weights drawn with `seed`.
    Raises ValueError as `resolve_model` and `ModelConfig.from_hf` do, and for a damaged or unfitting checkpoint.
    """
    if load_format == "dummy":
        decoder = Decoder(load_config(model, load_format="dummy"), dtype, device)
        _fill_randomly(decoder, seed)
    else:
        folder = _folder(model, load_format)
        config, files = ModelConfig.from_folder(folder), _weight_files(folder)
        _check_checkpoint(config, folder, files)  # before anything is allocated: sizes are a stranger's
        decoder = Decoder(config, dtype, device)
        _fill_from_files(decoder, files)
    return decoder.eval()


def _folder(model: str | Path, load_format: str) -> Path:
    is_gguf = str(model).endswith(".gguf")
    if load_format == "gguf" and not is_gguf:
        raise ValueError(f"load_format='gguf' needs the path of a .gguf file, got {str(model)!r}.")
    if load_format == "safetensors" and is_gguf:
        raise ValueError(f"load_format='safetensors' does not read {str(model)!r}. Use load_format='auto' or 'gguf'.")
    return resolve_model(model)


@torch.no_grad()
def _fill_randomly(decoder: Decoder, seed: int) -> None:
    """Norms are 1, biases small, and matrices keep the size of what passes through, so that any dtype holds the activations."""
    generator = torch.Generator(device=decoder.embed_tokens.device).manual_seed(seed)
    for name, tensor in decoder.checkpoint_tensors():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            # a variable uniform in [-b, b] has variance b^2 / 3: this makes it 1 / fan_in
            bound = math.sqrt(3 / tensor.shape[-1]) if tensor.dim() == 2 else 0.02
            tensor.uniform_(-bound, bound, generator=generator)


def expected_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """Name and shape of every tensor of a checkpoint of this config. Allocates nothing. Raises ValueError for sizes that no
    machine can hold."""
    try:
        outline = Decoder(config, torch.bfloat16, "meta")
    except (RuntimeError, TypeError) as error:  # a product beyond 64 bits
        raise ValueError(f"The sizes of the model's config are impossible together: {error}") from error
    return {name: list(tensor.shape) for name, tensor in outline.checkpoint_tensors()}


def _check_checkpoint(config: ModelConfig, folder: Path, files: list[Path]) -> None:
    """Names, shapes and types of all tensors, by the files' headers alone, against the config."""
    wanted = expected_shapes(config)
    for file in files:
        for name, shape, dtype in _headers(file):
            if _follows_from_others(name, config):
                continue
            target = wanted.pop(name, None)
            if target is None:
                raise ValueError(f"{file} holds tensor {name!r}, which has no place in a {config.architecture} of this config.")
            if shape != target:
                raise ValueError(f"{file}: tensor {name!r} has shape {shape}, where config.json asks for {target}.")
            if dtype not in _FLOATS:
                raise ValueError(f"{file}: tensor {name!r} is {dtype}: quantized safetensors are not served.")
    if wanted:
        names = ", ".join(list(wanted)[:5]) + (f" and {len(wanted) - 5} more" if len(wanted) > 5 else "")
        raise ValueError(f"The checkpoint in {folder} lacks {names}: it is incomplete. Fetch the model again.")


def _follows_from_others(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints carry although other values say the same."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


@torch.no_grad()
def _fill_from_files(decoder: Decoder, files: list[Path]) -> None:
    targets = dict(decoder.checkpoint_tensors())
    for file in files:
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict and cannot be iterated)
                if not _follows_from_others(name, decoder.config):
                    targets[name].copy_(opened.get_tensor(name))  # a view of the mapped file until it is copied


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{folder / _INDEX} must have a weight_map from tensor names to files. Fetch the model again.")
        if outside := [name for name in weight_map.values() if Path(name).name != name]:
            raise ValueError(f"{folder / _INDEX} names {outside[0]!r}: weights must lie in the model's own folder.")
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files and (list(folder.glob("*.bin")) or list(folder.glob("*.pth"))):
        raise ValueError(
            f"{folder} holds PyTorch .bin weights only: opening those can run code, so they are not read. Convert them once,"
            f" with transformers: AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)."
        )
    if not files:
        raise ValueError(f"{folder} holds no .safetensors weights. For random ones, use load_format='dummy'.")
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{folder / _INDEX} names {file.name}, which is not there: an incomplete download. Fetch it again."
            )
    return files


def _headers(file: Path) -> Iterator[tuple[str, list[int], str]]:
    """Name, shape and type ("F32", "I8") of each tensor of one file. No data is read."""
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118
            header = opened.get_slice(name)
            yield name, list(header.get_shape()), str(header.get_dtype())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except SafetensorError as error:
        size = file.stat().st_size
        raise ValueError(f"{file} is damaged or cut short ({size} bytes): {error}. Fetch the model again.") from error
