"""What Horovod's names need for any framework."""
