from __future__ import annotations

import pytest

from minivllm.text.tokenizer import Tokenizer
from tests.api.harness import TEMPLATE
from tests.text.small_tokenizers import make_byte_level


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    made = make_byte_level()
    made.chat_templates["default"] = TEMPLATE
    return made
