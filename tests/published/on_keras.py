#!/usr/bin/env python3
"""on_keras.py SCRIPT WORD ...: runs a script for TensorFlow, whose digits are made, because there is nothing to download them from. Packages
that need a cloud have stand-ins in the folder stand_ins."""
import os
import pathlib
import runpy
import sys

import keras
import numpy as np

STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


def load_data(path=None):
    """Returns images and classes as keras.datasets.mnist.load_data() does. Each class is a pattern of its own, with noise."""
    random = np.random.default_rng(1)
    patterns = random.random((10, 28, 28)) > 0.7

    def made(count):
        classes = random.integers(10, size=count).astype(np.uint8)
        return (patterns[classes] * 90 + random.integers(166, size=(count, 28, 28))).astype(np.uint8), classes
    return made(int(os.environ.get("PUBLISHED_SAMPLES", "4096"))), made(512)


if __name__ == "__main__":
    keras.datasets.mnist.load_data = load_data
    os.environ["PATH"] = f"{STAND_INS / 'bin'}:{os.environ['PATH']}"
    script = os.path.abspath(sys.argv[1])
    sys.path[0] = str(STAND_INS)
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = sys.argv[1:]
    runpy.run_path(script, run_name="__main__")
