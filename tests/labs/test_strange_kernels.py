"""What holds for every notebook and every kernel it may run in."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checks.student.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted([*(ROOT / "labs").glob("*.ipynb"), *(ROOT / "solutions").glob("*.ipynb")])


def test_case_2_loading_the_model_twice_is_one_model(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 16, "max_position_embeddings": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    from safetensors.torch import save_file

    from minivllm.models.weights import load_model

    decoder = load_model(tmp_path, dtype=torch.float32, load_format="dummy")
    save_file({n: t.clone() for n, t in decoder.checkpoint_tensors()}, tmp_path / "model.safetensors")
    lab = Lab("01", "cpu", torch.float32, str(tmp_path), True)
    assert lab.load_decoder() is lab.load_decoder()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_case_14_no_cell_says_cuda_without_asking_for_it(path: Path) -> None:
    """`.cuda()`, `device="cuda"` and the like, outside of a function or a branch that asked whether there is one."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or "cuda" not in text:
            continue
        for node in ast.parse(text).body:
            asks = "is_available" in ast.unparse(node) or isinstance(node, (ast.If, ast.FunctionDef, ast.ClassDef, ast.Import))
            calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            hard = [c for c in calls if ast.unparse(c.func).endswith(".cuda") or "device='cuda'" in ast.unparse(c)]
            assert asks or not hard, f"{cell['id']}: {ast.unparse(hard[0])}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_case_20_no_notebook_is_over_one_megabyte(path: Path) -> None:
    assert path.stat().st_size < 1 << 20
