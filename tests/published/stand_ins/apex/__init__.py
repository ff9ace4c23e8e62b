"""In place of NVIDIA's apex, which needs a GPU: what the scripts import, and the operations on lists of tensors."""
