"""A batch of requests as rows of attention. NumPy; may not know tensors. Labs: built by none."""

from __future__ import annotations

import numpy as np


def attention_rows(
    num_tokens: np.ndarray,
    num_single: int,
    starts: np.ndarray,
    positions: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
) -> dict[str, np.ndarray]:
    """Requests [B] as rows of attention: the first `num_single` have a row for each of their tokens (decodes of one block
    table, each a token longer than the last: how drafts are verified), the others one for all.

    num_tokens [B], starts [B + 1], positions [T]: of their tokens. Returns query_start_loc, seq_lens and block_tables."""
    num_decodes = starts[num_single]
    if num_decodes > num_single:
        starts = np.concatenate([np.arange(num_decodes), starts[num_single:]])
        seq_lens = np.concatenate([positions[:num_decodes] + 1, seq_lens[num_single:]])
        per_token = block_tables[:num_single].repeat(num_tokens[:num_single], axis=0)
        block_tables = np.concatenate([per_token, block_tables[num_single:]])
    return {
        "query_start_loc": starts.astype(np.int32),
        "seq_lens": seq_lens.astype(np.int32),
        "block_tables": block_tables,
    }
