"""Horovod's names for Keras: `import shoal.horovod.keras as hvd`, an alias of shoal.horovod.tensorflow.keras."""
from ..tensorflow.keras import *  # noqa: F401,F403
from ..tensorflow.keras import callbacks, elastic  # noqa: F401
