"""In place of torchnet, which needs a server for plots."""
