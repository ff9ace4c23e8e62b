"""smp.nn.huggingface: translations of states. A model keeps its own modules, also with tensor parallelism, so they change nothing."""
