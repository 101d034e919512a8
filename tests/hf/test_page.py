"""The script of docs/language_models.md, on one process and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.dist.forks import OF_HF, fork_server
from tests.dist.script import run_forked
from tests.hf.cases import model_of

PAGE = Path(__file__).parents[2] / "docs/language_models.md"

#: What a reader would look at; one write, so that lines of two processes do not mix.
LOOK = """
line = f"loss {loss.item():.5f}; perplexity {perplexity.item():.4f}; {texts.tolist()}"
print(line + "\\n", end="", flush=True)
"""

pytestmark = pytest.mark.dist


def test_the_script_of_the_page(tmp_path: Path) -> None:
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert "rank" not in code
    printed = []
    for num_ranks in (None, 2):
        folder = tmp_path / str(num_ranks)
        plain = model_of("Llama", tie_word_embeddings=True).float()
        plain.save_pretrained(folder)
        start = f"import os, torch\nos.environ['FOLDER'] = {str(folder)!r}\ntorch.manual_seed(0)\n"
        fork_server().load(*OF_HF)
        done = run_forked(start + code + LOOK, num_ranks=num_ranks).check()

        lines = [line for line in done.stdout.splitlines() if line.startswith("loss")]
        assert len(set(lines)) == 1, "each rank has the same"
        assert len(lines) == (num_ranks or 1)
        printed.append(lines[0])
        trained = AutoModelForCausalLM.from_pretrained(folder / "out")
        assert not torch.equal(trained.lm_head.weight, plain.lm_head.weight)
        assert trained.lm_head.weight is trained.model.embed_tokens.weight
        assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert printed[0] == printed[1]
