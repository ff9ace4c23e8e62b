"""Data in and results out: channels, checkpoints, stores of objects, and the progress of downloads."""
