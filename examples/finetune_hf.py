"""Train a language model of transformers, then fine-tune it, with one process a stage.

    torchrun --nproc_per_node=2 examples/finetune_hf.py --out runs/base
    torchrun --nproc_per_node=2 examples/finetune_hf.py --model runs/base --lora

It reads Python's manual, which comes with Python, byte by byte, so nothing is downloaded. The first
line trains a small Llama from random values; the second trains adapters for the saved model. With
``--state runs/state``, an interrupted run continues from its last saved state.
Any number of processes gives the same losses.
"""

import argparse
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from procpipe import Stage, hf, state

CONTEXT = 128  # bytes of a paragraph
END = 256  # the token after a paragraph
SMALL_LLAMA = {
    "vocab_size": 257, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "bos_token_id": END, "eos_token_id": END,
}  # fmt: skip


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    paragraphs = read_paragraphs()[: args.paragraphs]
    loader: Any = partial(DataLoader, batch_size=args.batch_size, collate_fn=padded)
    training = state.Resumable(loader(paragraphs[len(paragraphs) // 20 :], shuffle=True))
    others = loader(paragraphs[: len(paragraphs) // 20])

    config = AutoConfig.from_pretrained(args.model) if args.model else llama_config()
    with torch.device("meta"):  # no memory here; Stage allocates this process's layers only
        model: Any = AutoModelForCausalLM.from_config(config)
        if args.lora:
            model = with_adapters(model)
    stage = Stage(hf.sequential(model), chunks=args.chunks, loss_fn=hf.causal_lm_loss)
    if args.model:
        hf.load_pretrained(stage, args.model)
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    progress: dict[str, Any] = {"epoch": 0, "step": 0, "loader": training}
    if args.state:
        state.load(args.state, stage, optimizer, extra=progress, missing_ok=True)
    stage.print(f"{len(paragraphs)} paragraphs, balance {stage.balance}")

    while progress["epoch"] < args.epochs:
        for batch in stage.batches(training):
            optimizer.zero_grad()
            loss = stage.step(**batch)
            stage.clip_grad_norm_(1.0)
            optimizer.step()
            progress["step"] += 1
            if progress["step"] % args.every == 0:
                stage.print(f"step {progress['step']:4}   loss {loss.item():.4f}")
                if args.state:
                    state.save(args.state, stage, optimizer, extra=progress)
            if progress["step"] == args.steps:
                break
        progress["epoch"] += 1
        stage.print(f"perplexity of other paragraphs: {perplexity(stage, others):.3f} a byte")
        if progress["step"] == args.steps:
            break

    if args.out:
        (hf.save_adapter if args.lora else hf.save_pretrained)(stage, args.out)
    prompt = torch.tensor([list(b"The ")])
    tokens = hf.generate(
        stage,
        prompt,
        max_new_tokens=args.generate,
        do_sample=True,
        temperature=0.7,
        eos_token_id=END,
    )
    stage.print(
        bytes(token for token in tokens[0].tolist() if token < END).decode(errors="replace")
    )


def llama_config() -> Any:
    """Return the configuration of a model that is small enough for two CPUs."""
    return AutoConfig.for_model("llama", **SMALL_LLAMA)


def with_adapters(model: Any) -> Any:
    """Freeze a model, and add low-rank matrices to its attention that are trained instead."""
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, options)


def read_paragraphs() -> list[bytes]:
    """Return the paragraphs of Python's manual, in order."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return [part.encode()[:CONTEXT] for part in text.split("\n\n") if len(part) > 8]


def padded(paragraphs: list[bytes]) -> dict[str, Tensor]:
    """Make a batch of paragraphs: tokens, which of them there are, and the labels that count."""
    tokens = [torch.tensor([*paragraph, END]) for paragraph in paragraphs]
    pad = partial(torch.nn.utils.rnn.pad_sequence, tokens, batch_first=True)
    mask = (pad(padding_value=-100) != -100).long()
    return {"input_ids": pad(), "attention_mask": mask, "labels": pad(padding_value=-100)}


@torch.no_grad()
def perplexity(stage: Stage, batches: Iterable[Any]) -> float:
    """Return the perplexity of a token, over all tokens of all batches."""
    stage.eval()
    total = weight = torch.zeros(())
    for batch in stage.batches(batches):
        loss = stage.step(**batch)
        total = total + loss * stage.last_weight
        weight = weight + stage.last_weight
    stage.train()
    return math.exp(total / weight)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="folder of a model to start from; by default random values")
    parser.add_argument("--lora", action="store_true", help="train adapters, not the model")
    parser.add_argument("--out", help="folder to save the model in, or the adapters")
    parser.add_argument("--state", help="folder to save the state of training in")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, help="largest number of steps")
    parser.add_argument("--paragraphs", type=int, help="number to read")
    parser.add_argument("--generate", type=int, default=CONTEXT, help="bytes to sample at the end")
    parser.add_argument("--every", type=int, default=50, help="steps between printed losses")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=4, help="micro-batches in a mini-batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    if arguments.out and Path(arguments.out).exists():
        parser.error(f"--out {arguments.out} exists already")
    return arguments


if __name__ == "__main__":
    main()
