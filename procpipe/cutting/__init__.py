"""Any module as an ``nn.Sequential``: its forward is recorded once, and cut between its modules.

sequential.py   sequential(): from a model and a sample to layers; which modules are opened
record.py       one forward as a graph over the model's modules
changes.py      what a forward changes that the layers do not have: refused, with the line
sizes.py        sizes as numbers that note what is computed from them, and what is decided by them
divide.py       train and eval mode in one graph; pieces, between which the fewest bytes travel
layers.py       the layers that pieces become: their code, and what they hold
"""

from procpipe.cutting.sequential import CutModel, sequential

__all__ = ["CutModel", "sequential"]
