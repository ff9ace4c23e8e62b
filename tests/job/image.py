"""The contents of an image with Shoal: SageMaker's training toolkit from pip, Open MPI, PyTorch, Debian's sshd."""
import os
import pathlib

from containers import TOP, Containers, Skip

TOOLKIT = TOP / "build/toolkit"
SSHD = TOOLKIT / "sshd"
LIBRARY = pathlib.Path(os.environ.get("SHOAL_LIBRARY", TOP / "build/libshoal.so"))
START = [f"{TOOLKIT}/bin/train"]
# The runners of mpirun sleep 30 s at the end. All ranks import PyTorch at once, while other tests run.
RUN_S = 300


def programs(folder):
    """Returns a PATH with the toolkit, `smddprun` as pip makes it, and Open MPI's mpirun."""
    folder.mkdir()
    (folder / "smddprun").write_text(f"#!{TOOLKIT}/bin/python3\nimport sys\n"
                                     "from smdistributed.dataparallel._smddprun import main\nsys.exit(main())\n")
    (folder / "smddprun").chmod(0o755)
    (folder / "mpirun").symlink_to("/usr/bin/mpirun.openmpi")
    return f"{folder}:{TOOLKIT}/bin:{TOP}/build/torch/bin:{os.environ['PATH']}"


def variables(containers):
    """Returns the image's environment. Puts its programs next to the containers."""
    return {"PATH": programs(containers.folder / "bin"), "HOME": "/tmp/home",
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
            "PYTHONPATH": str(TOP / "python"), "SHOAL_LIBRARY": str(LIBRARY), "SHOAL_TORCH_SHIM": "python",
            "OMP_NUM_THREADS": "1"}


def why_not():
    """Returns what this machine lacks for such containers, or None."""
    for path, what in ((TOOLKIT / "bin/train", "the toolkit"), (SSHD / "usr/sbin/sshd", "sshd"), (LIBRARY, "the library"),
                       (TOP / "build/torch/bin/torchrun", "PyTorch"), (pathlib.Path("/usr/bin/mpirun.openmpi"), "Open MPI"),
                       (pathlib.Path("/usr/bin/orted"), "Open MPI 4")):
        if not path.exists():
            return f"there is no {path} ({what}): `make test-all` makes it"
    try:
        with Containers(["algo-1"]):
            return None
    except Skip as reason:
        return str(reason)
