"""Skip tensors, straight from the layer that stashes them to the layers that pop them.

The names are torchgpipe's, so its users change an import:

    from procpipe.skip import Namespace, pop, skippable, stash, verify_skippables
"""

from procpipe.skip.skippable import pop, skippable, stash, verify_skippables
from procpipe.skip.tracker import Namespace

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
