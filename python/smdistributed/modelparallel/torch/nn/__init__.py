"""smp.nn: names of modules that scripts use."""
from torch.nn import LayerNorm

FusedLayerNorm = LayerNorm  # torch's own kernel is fused on the CPU
