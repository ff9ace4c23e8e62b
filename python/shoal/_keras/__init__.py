"""What Keras 3 needs on several workers, for any framework. shoal.tensorflow.keras and shoal.torch.keras complete it."""
