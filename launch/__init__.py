"""The launcher: starts one process per stage. Installed as ``procpipe.launch``."""
