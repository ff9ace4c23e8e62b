"""A notebook cell from SageMaker's documentation; only the import differs.

To run it: `make demo-job`, which first stores the data on an S3 server on this machine (demo.py)."""
import gzip
import os

import numpy

from shoal.job import PyTorch  # was: from sagemaker.pytorch import PyTorch

BUCKET = os.environ.get("DEMO_BUCKET", "s3://shoal-demo")

estimator = PyTorch(
    entry_point="train.py",
    source_dir=os.path.join(os.path.dirname(os.path.abspath(__file__)), "source"),
    role="SageMakerRole",
    instance_count=2,
    instance_type="ml.p4d.24xlarge",
    framework_version="2.0.1",
    py_version="py310",
    distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
    hyperparameters={"epochs": 2, "batch-size": 120},
    metric_definitions=[{"Name": "loss", "Regex": "loss=(.*?);"}, {"Name": "test_accuracy", "Regex": "test_accuracy=(.*?);"}],
)
estimator.fit({"train": f"{BUCKET}/train", "test": f"{BUCKET}/test"})
print("model:", estimator.model_data)

predictor = estimator.deploy(initial_instance_count=1, instance_type="ml.g5.xlarge")
with gzip.open("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz") as file:
    images = numpy.frombuffer(file.read(16 + 10 * 28 * 28), dtype=numpy.uint8, offset=16).reshape(10, 28, 28)
with gzip.open("/usr/share/datasets/fashion-mnist/t10k-labels-idx1-ubyte.gz") as file:
    labels = numpy.frombuffer(file.read(8 + 10), dtype=numpy.uint8, offset=8)
classes = predictor.predict(images)
predictor.delete_endpoint()
print("ten images:", *(f"{got}{'' if got == right else f' (is {right})'}" for got, right in zip(classes, labels)))
