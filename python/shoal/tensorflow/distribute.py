"""TensorFlow's own strategies together with Shoal: the workers' addresses come from the job, and Shoal's operations work in the
same loop.

    shoal.init()
    strategy = shoal.distribute.MultiWorkerMirroredStrategy()     # before anything that TensorFlow computes

The strategy communicates through TensorFlow's gRPC; Shoal's operations communicate through Shoal."""
from __future__ import annotations

import json
import os
import socket

import tensorflow as tf

from . import _world

ROW_BYTES = 256  # size of an address as text
_held = []  # the sockets that hold this rank's port


def set_tf_config() -> dict:
    """Writes TF_CONFIG, in which each rank of the job is a worker, and returns it. Every rank calls it. A TF_CONFIG of the
    launcher stays if it describes this job."""
    world, given = _world.current(), os.environ.get("TF_CONFIG")
    if given:
        return _checked(given, world)
    _held.append(_bound())
    workers = _gathered(world, f"{_own_address(world)}:{_held[-1].getsockname()[1]}")
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": world.rank}}
    os.environ["TF_CONFIG"] = json.dumps(config)
    return config


def MultiWorkerMirroredStrategy(**options) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Makes TensorFlow's strategy over the ranks of the job. Every rank calls it, after init() and before TensorFlow computes
    anything."""
    config = set_tf_config()
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(**options)
    except RuntimeError as error:
        raise RuntimeError(f"shoal: rank {config['task']['index']} cannot make a MultiWorkerMirroredStrategy: {error}. Make it right "
                           "after shoal.tensorflow.init(), before anything that TensorFlow computes") from error


def _checked(given, world):
    try:
        config = json.loads(given)
        workers, task = config["cluster"]["worker"], config["task"]
        means = len(workers), task["type"], task["index"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"shoal: rank {world.rank} of {world.size} has a TF_CONFIG that names no cluster of workers and no task: "
                         f"{given}. Unset it, and one is made from the job") from None
    if means != (world.size, "worker", world.rank):
        raise ValueError(f"shoal: rank {world.rank} of {world.size} has a TF_CONFIG of {means[1]} {means[2]} among {means[0]} workers: "
                         "unset it, and one is made from the job")
    return config


def _bound():
    """Returns a socket that is bound to a free port and does not listen. While it is open, the kernel assigns the port to no other
    socket, but TensorFlow's server, which sets SO_REUSEADDR, can listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _own_address(world):
    """Returns the address by which other hosts reach this one: the source address of the route to host 0."""
    if world.place.hosts == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))  # sends nothing
        own = way.getsockname()[0]
    return own if not own.startswith("127.") else socket.gethostbyname(socket.gethostname())


def _gathered(world, text):
    """Returns the texts of all ranks. It does not use TensorFlow, because a strategy must be made before TensorFlow computes
    anything."""
    rows = world.gather(text.encode().ljust(ROW_BYTES, b"\0"), "the addresses of workers were not exchanged")
    return [row.rstrip(b"\0").decode() for row in rows]
