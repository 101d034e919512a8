"""Saving a run and resuming it, on any number of stages or in plain PyTorch.

resumed = state.load("runs/digits", stage, optimizer, extra=progress, missing_ok=True)
…
state.save("runs/digits", stage, optimizer, extra=progress, step=step)

files.py         the files of saved states: one a rank; whole when all are there
values.py        what can be saved; tensors in files, which are mapped and read when copied
saving.py        save()                    ┐ what each rank does, and when all have
background.py    Saving, asynchronous=True │ done it
loading.py       load()                    ┘
weights.py       load_weights(), export()  without optimizer or progress
sources.py       what files of weights hold, of every kind
keys.py          what values are called in files of other programs
optimizers.py    optimizer state under the names of parameters
extras.py        what else a user saves
resumable.py     random number generators; Resumable: the position in a data loader
sharded.py       DTensors
member.py        the same call on every rank, of all pipelines that share layers; faults of all
                 ranks in one error
"""

from procpipe.state.background import Saving
from procpipe.state.loading import Saved, load
from procpipe.state.resumable import Resumable
from procpipe.state.saving import save
from procpipe.state.weights import export, load_weights

__all__ = ["Resumable", "Saved", "Saving", "export", "load", "load_weights", "save"]
