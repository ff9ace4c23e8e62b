"""Names of tensor parallelism that scripts import."""
