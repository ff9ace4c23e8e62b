"""Called by torch while it is imported, in every process of the environment: quick, silent, and without the C library."""


def register() -> None:
    """Registers the back-end. Where shoal.torch is being imported, and imports torch, it does so itself at its end."""
    import torch.distributed

    if torch.distributed.is_available():
        import shoal.torch  # noqa: F401
