"""What Keras 3 needs on several workers, whichever framework it runs on. shoal.tensorflow.keras and shoal.torch.keras complete it."""
