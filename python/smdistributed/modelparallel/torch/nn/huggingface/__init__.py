"""smp.nn.huggingface: translations of states. Without tensor parallelism a model has its own modules, so they change nothing."""
