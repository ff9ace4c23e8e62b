"""Jobs on SageMaker itself, through the vendor's own SDK, which is imported where it is needed and not before.

SDK v3 starts a driver on every host; `Shoal` names ours (sagemaker_driver/), which starts `shoal run`:

    from sagemaker.train import ModelTrainer
    from shoal.job.sagemaker import Shoal
    ModelTrainer(..., distributed=Shoal(process_count_per_node=8)).train()

The container has to have Shoal: in its image, or named in the requirements of the source."""
from __future__ import annotations

import pathlib
import secrets
from typing import Any, List, Optional

DRIVERS = pathlib.Path(__file__).resolve().parent / "sagemaker_driver"


# ---- The driver of SDK v3 ----

def _make_config() -> Any:
    """The class Shoal. Its base is the SDK's, so it exists only where that can be imported."""
    try:
        from pydantic import Field
        from sagemaker.train.distributed import DistributedConfig
    except ImportError as error:
        raise ImportError(f"shoal.job.sagemaker.Shoal is for the SageMaker Python SDK v3, which cannot be imported ({error}); "
                          "pip install 'sagemaker>=3'") from error

    class Shoal(DistributedConfig):
        """For `distributed` of sagemaker.train.ModelTrainer: every host starts its workers by `shoal run`.

        process_count_per_node: workers of each host; nothing: its GPUs, else 1.
        run_options: more options of `shoal run`, such as ["--bind", "core"].
        secret: what the workers prove to each other; drawn for each object. It travels with the drivers, below the job's S3
        prefix."""

        process_count_per_node: Optional[int] = Field(default=None, ge=1)
        run_options: Optional[List[str]] = None
        secret: str = Field(default_factory=lambda: secrets.token_hex(32), repr=False)

        @property
        def driver_dir(self) -> str:
            return str(DRIVERS)

        @property
        def driver_script(self) -> str:
            return "shoal_driver.py"

    Shoal.__module__, Shoal.__qualname__ = __name__, "Shoal"
    return Shoal


def __getattr__(name: str) -> Any:
    if name != "Shoal":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["Shoal"] = _make_config()
    return globals()["Shoal"]
