"""torch calls this during its import, in every process of the environment. It must be quick and silent, and does not load the C
library."""


def register() -> None:
    """Registers the back-end. If shoal.torch is the module that imports torch, it registers the back-end itself at its end."""
    import torch.distributed

    if torch.distributed.is_available():
        import shoal.torch  # noqa: F401
