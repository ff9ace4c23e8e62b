"""The names by which scripts find the layers of a transformed model, to wrap and to checkpoint them."""
import abc


class TransformerLayer(abc.ABC):
    """isinstance() is true for the layers of each model that torch.sagemaker.transform has returned. They keep their own classes."""


TETransformerLayer = TransformerLayer
