"""The sampling a model recommends: generation_config.json, read as vLLM reads it. Used when a request brings no parameters.

Labs: built by none. May not know torch.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from minivllm.components import Components
from minivllm.models.registry import read_json
from minivllm.sampling_params import SamplingParams

logger = logging.getLogger("minivllm")

_FIELDS = {  # its name -> ours
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "repetition_penalty": "repetition_penalty",
}
# What it may ask that would change the text and is not served, with the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "typical_p": (1.0,),
}


def default_sampling_params(folder: Path | None, components: Components) -> SamplingParams:
    """SamplingParams() with the model's recommendations. What is recommended but not possible (here, or with a replaced
    sampler) is left out, with a line in the log: nobody asked for it by name. Raises ValueError for values that are wrong."""
    file = None if folder is None else folder / "generation_config.json"
    if file is None or not file.is_file():
        return SamplingParams()
    recommended = read_json(file)
    for name, neutral in _NOT_SERVED.items():
        value = recommended.get(name)
        if value is not None and value not in neutral:
            logger.warning("%s recommends %s=%r, which minivllm does not serve: sampling without it.", file, name, value)
    values = {ours: recommended[theirs] for theirs, ours in _FIELDS.items() if recommended.get(theirs) is not None}
    for name, capability in (("top_k",) * 2, ("top_p",) * 2, ("min_p",) * 2, ("repetition_penalty", "penalties")):
        if name in values and not components.require("sampler", capability, None):
            del values[name]
    try:
        params = SamplingParams(**values)
    except ValueError as error:
        raise ValueError(f'{file}: {error} Correct it, or use generation_config="vllm" to ignore the file.') from error
    if values:
        logger.info("Default sampling from the model: %s.", ", ".join(f"{name}={value}" for name, value in values.items()))
    return params
