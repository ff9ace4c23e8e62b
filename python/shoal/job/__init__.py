"""Training jobs: what is trained, where, with which `distribution`, on which data; docs/jobs.md is the manual.

A job is one document (document.py). The estimators write it and the command `shoal job` reads it. Everything that happens is
kept in one folder per job (folder.py).

    from shoal.job import PyTorch, TrainingInput

Names are imported when they are first used, so agents and workers do not pay for importing the estimators."""
from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "document": ("Channel", "Checkpoints", "Job", "JobError", "Metric", "Where"),
    "document.reading": ("job_read",),
    "sdk.estimator": ("Estimator", "Framework", "HuggingFace", "PyTorch", "TensorFlow", "TrainingJobAnalytics", "UnexpectedStatusException"),
    "sdk.inputs": ("FileSystemInput", "ShuffleConfig", "TrainingInput"),
    "sdk.predictor": ("ModelError", "Predictor", "PyTorchModel", "PyTorchPredictor", "TensorFlowModel", "TensorFlowPredictor"),
    "sdk.serializers": (
        "BytesDeserializer", "CSVDeserializer", "CSVSerializer", "DataSerializer", "IdentitySerializer", "JSONDeserializer",
        "JSONLinesDeserializer", "JSONLinesSerializer", "JSONSerializer", "LibSVMSerializer", "NumpyDeserializer",
        "NumpySerializer",
        "PandasDeserializer", "SparseMatrixSerializer", "StreamDeserializer", "StringDeserializer", "StringSerializer",
        "TorchTensorDeserializer", "TorchTensorSerializer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
