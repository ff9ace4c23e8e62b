"""Attention for models of transformers."""
