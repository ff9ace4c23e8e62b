"""For PyTorch: `torch_smddp` registers the back-end "smddp"; `distributed` and `parallel` are the API before 1.4."""
