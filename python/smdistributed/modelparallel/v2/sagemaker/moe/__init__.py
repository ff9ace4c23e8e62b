"""Mixtures of experts: not served."""
