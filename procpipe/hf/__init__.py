"""Models of Hugging Face's transformers as pipelines: in, trained, out.

sequential.py       sequential(): an nn.Sequential over a model's own modules
compared.py         classes that were compared; a small copy of others is, at the start
stack.py            a model's forward without its blocks: what they are called with
layers.py           its layers: embeddings, blocks, head
weights.py          load_pretrained(), save_pretrained()
loss.py             causal_lm_loss
lora.py             load_adapter(), save_adapter()
generation.py       generate(): transformers' own, over the stages
"""

from procpipe.hf.generation import generate
from procpipe.hf.lora import load_adapter, save_adapter
from procpipe.hf.loss import causal_lm_loss
from procpipe.hf.sequential import sequential
from procpipe.hf.weights import load_pretrained, save_pretrained

__all__ = [
    "causal_lm_loss",
    "generate",
    "load_adapter",
    "load_pretrained",
    "save_adapter",
    "save_pretrained",
    "sequential",
]
