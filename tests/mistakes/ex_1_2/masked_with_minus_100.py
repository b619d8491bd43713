# expect: -100, or 0, is larger than those that count|-100 is larger than those that count
import torch


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention: q [T, H, D] are the last T of the S positions of k and v [S, Hkv, D]."""
    T, H, D = q.shape
    S, num_kv_heads, _ = k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    k_SHD = k.to(wide).repeat_interleave(H // num_kv_heads, dim=1)
    v_SHD = v.to(wide).repeat_interleave(H // num_kv_heads, dim=1)
    scores_HTS = torch.einsum("thd,shd->hts", q.to(wide), k_SHD) * (D**-0.5 if scale is None else scale)

    q_positions = torch.arange(S - T, S, device=q.device)[:, None]
    k_positions = torch.arange(S, device=q.device)[None, :]
    hidden = k_positions > q_positions
    if sliding_window is not None:
        hidden = hidden | (k_positions <= q_positions - sliding_window)
    scores_HTS = scores_HTS.masked_fill(hidden, -100.0)
    return torch.einsum("hts,shd->thd", scores_HTS.softmax(-1), v_SHD).to(q.dtype)
