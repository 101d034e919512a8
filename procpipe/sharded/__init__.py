"""Stages whose layers are sharded over other processes: FSDP2, tensor parallelism."""
