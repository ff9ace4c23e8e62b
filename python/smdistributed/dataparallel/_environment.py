"""The rank and its peers as scripts read them, whatever launched them. No torch here."""
import os
import sys

from smdistributed.dataparallel import __version__

# mpirun of Open MPI, which is how SageMaker starts them, has other names for what torchrun and `shoal run` call so.
FROM_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
PORT = "7592"  # where SageMaker's launcher has the first host listen


def started_as_job():
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def on_one_host():
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def complete():
    """Adds the variables that are missing and follow from others; changes none."""
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
    """The lines by which logs of such jobs are recognised, once per job."""
    if os.environ.get("RANK") != "0":
        return
    print(f"Running smdistributed.dataparallel v{__version__} (Shoal)", file=sys.stderr, flush=True)
    if on_one_host():
        print("SMDDP: Single node mode", file=sys.stderr, flush=True)
