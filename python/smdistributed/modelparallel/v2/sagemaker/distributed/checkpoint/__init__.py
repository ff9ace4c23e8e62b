"""Checkpoints over torch.distributed.checkpoint, in files that any number of ranks loads."""
