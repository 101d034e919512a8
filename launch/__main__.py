"""``python -m procpipe.launch run train.py``, where the ``procpipe`` command is not on the path."""

import sys

from procpipe.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
