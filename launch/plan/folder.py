"""Makes the subject of ``procpipe plan --hf FOLDER``: a model of which only the config is read.

The model, its inputs and its labels are on the meta device, so a model of any size needs no memory.
Nothing is downloaded, and no code of the folder is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from procpipe.balance import Inputs
from procpipe.launch.plan.subject import MistakeError, Subject, load_loss

_LENGTH = 1024

#: By how the name of a model's class ends: the class of transformers that builds it, and the loss,
#: which the line to paste names as here behind the colon.
_CAUSAL = "AutoModelForCausalLM", "procpipe:hf.causal_lm_loss"
_MASKED = "procpipe.losses:masked_cross_entropy"
_KINDS = {
    "ForMaskedLM": ("AutoModelForMaskedLM", _MASKED),
    "ForTokenClassification": ("AutoModelForTokenClassification", _MASKED),
    "ForSequenceClassification": (
        "AutoModelForSequenceClassification",
        f"{__name__}:F.cross_entropy",
    ),
}


def load_folder(folder: str, batch: int, length: int | None, loss: str) -> tuple[Subject, str, str]:
    """Build the model of a folder's ``config.json``, and a mini-batch for it.

    Args:
        folder: as ``save_pretrained`` of transformers writes it.
        batch: samples of the mini-batch.
        length: tokens of each; by default 1024, or as many as the model can have at most.
        loss: the import path of the loss; "" for that of the model's class.

    Returns:
        The subject, the import path of its loss, and what it is, as a sentence.

    Raises:
        MistakeError: there is no such folder, or its model cannot be divided.
    """
    file = Path(folder, "config.json")
    if not file.is_file():
        raise MistakeError(
            f"--hf {folder}: there is no file {file}; nothing is downloaded, so give a folder that "
            "save_pretrained() has written, or that holds config.json"
        )
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MistakeError(f"{error}: pip install 'procpipe[hf]'") from error
    from procpipe import hf

    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if config.is_encoder_decoder:
            raise TypeError(
                "its model has an encoder: plan mymodel:build --any, which cuts it by "
                "procpipe.sequential"
            )
        architecture = next(iter(config.architectures or ()), "")
        kinds = (kind for end, kind in _KINDS.items() if architecture.endswith(end))
        auto, usual_loss = next(kinds, _CAUSAL)
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(config, trust_remote_code=False)
        layers = hf.sequential(model)
    except Exception as error:
        reason, _, rest = str(error).strip().partition("\n")
        if reason.endswith(":"):  # what is wrong follows
            reason += " " + rest.strip().partition("\n")[0]
        raise MistakeError(f"--hf {folder}: {type(error).__name__}: {reason}") from error
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length is not None and length > longest:
        raise MistakeError(
            f"--length {length}: the model has {longest} positions (max_position_embeddings)"
        )
    length = length or min(_LENGTH, longest or _LENGTH)
    loss = loss or usual_loss
    ids = torch.empty(batch, length, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "attention_mask": ids}
    dtype = next(model.parameters()).dtype
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    target = ids[:, 0] if auto == "AutoModelForSequenceClassification" else ids
    words = (
        f"{type(model).__name__}, as {file} describes it: {num_parameters:,} parameters, "
        f"{str(dtype).removeprefix('torch.')}, for samples of {length} tokens with padding"
    )
    return Subject(layers, Inputs(inputs), target, load_loss(loss), batch), loss, words


class AttentionOfGpus(TorchFunctionMode):
    """Lets attention with dropout keep what it does on GPUs: unlike on CPUs, no scores.

    Leaves out the dropout, which chooses another kernel on CPUs.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        return func(*args, **named)
