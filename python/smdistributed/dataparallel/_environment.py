"""The variables that scripts read for their rank and its peers, with any launcher. This module does not import torch."""
import os
import sys

from smdistributed.dataparallel import __version__

# The variables of Open MPI's mpirun, with which SageMaker starts scripts, for those of torchrun and `shoal run`.
FROM_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
PORT = "7592"  # the port at which the first host listens under SageMaker's launcher


def started_as_job():
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def on_one_host():
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def complete():
    """Sets missing variables that follow from others. Changes none."""
    for name, source in FROM_OPEN_MPI.items():
        if source in os.environ:
            os.environ.setdefault(name, os.environ[source])
    if not started_as_job():
        return
    if "LOCAL_RANK" in os.environ:
        os.environ.setdefault("SMDATAPARALLEL_LOCAL_RANK", os.environ["LOCAL_RANK"])
    if "SMDATAPARALLEL_SERVER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_ADDR", os.environ["SMDATAPARALLEL_SERVER_ADDR"])
    elif on_one_host():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", os.environ.get("SMDATAPARALLEL_SERVER_PORT", PORT))


def announce():
    """Prints the lines by which logs of such jobs are recognized, once per job."""
    if os.environ.get("RANK") != "0":
        return
    print(f"Running smdistributed.dataparallel v{__version__} (Shoal)", file=sys.stderr, flush=True)
    if on_one_host():
        print("SMDDP: Single node mode", file=sys.stderr, flush=True)
