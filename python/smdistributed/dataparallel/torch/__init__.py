"""For PyTorch: `torch_smddp` registers the back-end "smddp"; `distributed` and `parallel` are the API of versions before
1.4."""
