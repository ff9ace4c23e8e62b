"""Checkpoints of distributed models."""
