"""Saving a run and resuming it, on any number of stages or in plain PyTorch.

resumed = state.load("runs/digits", stage, optimizer, extra=progress, missing_ok=True)
…
state.save("runs/digits", stage, optimizer, extra=progress, step=step)

saving.py        save()                    ┐ what each rank does, and when all have
background.py    Saving, asynchronous=True │ done it
loading.py       load()                    ┘
weights.py       load_weights(), export()  without optimizer or progress
keys.py          what values are called in files of other programs
sources.py       what such files hold; tensors are read and written in pieces (pieces.py)
optimizers.py    optimizer state under the names of parameters
extras.py        what else a user saves
generators.py    random number generators
resumable.py     Resumable: the position in a data loader
folders.py       which saved state is the newest; publishing one by a rename
files.py         the files, in the format of torch.distributed.checkpoint
archives.py      what torch.save has written, read without unpickling (pickles.py)
index.py         where each value is
member.py        the same call on every rank; faults of all ranks in one error
"""

from procpipe.state.background import Saving
from procpipe.state.loading import Saved, load
from procpipe.state.resumable import Resumable
from procpipe.state.saving import save
from procpipe.state.weights import export, load_weights

__all__ = ["Resumable", "Saved", "Saving", "export", "load", "load_weights", "save"]
