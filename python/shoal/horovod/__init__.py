"""Horovod's names over Shoal: `import shoal.horovod.torch as hvd`. docs/horovod.md is the manual."""
