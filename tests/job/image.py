"""What an image with Shoal has: SageMaker's training toolkit as it comes from pip, Open MPI, PyTorch, Debian's sshd."""
import os
import pathlib

from containers import TOP, Containers, Skip

TOOLKIT = TOP / "build/toolkit"
SSHD = TOOLKIT / "sshd"
LIBRARY = pathlib.Path(os.environ.get("SHOAL_LIBRARY", TOP / "build/libshoal.so"))
START = [f"{TOOLKIT}/bin/train"]
# The runners of mpirun sleep 30 s at the end, and PyTorch is imported by all ranks at once, beside other tests.
RUN_S = 300


def programs(folder):
    """What is on PATH beside the toolkit: `smddprun`, as pip makes it, and Open MPI's mpirun."""
    folder.mkdir()
    (folder / "smddprun").write_text(f"#!{TOOLKIT}/bin/python3\nimport sys\n"
                                     "from smdistributed.dataparallel._smddprun import main\nsys.exit(main())\n")
    (folder / "smddprun").chmod(0o755)
    (folder / "mpirun").symlink_to("/usr/bin/mpirun.openmpi")
    return f"{folder}:{TOOLKIT}/bin:{TOP}/build/torch/bin:{os.environ['PATH']}"


def variables(containers):
    """The image's environment; its programs are put beside the containers."""
    return {"PATH": programs(containers.folder / "bin"), "HOME": "/tmp/home",
            "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
            "PYTHONPATH": str(TOP / "python"), "SHOAL_LIBRARY": str(LIBRARY), "SHOAL_TORCH_SHIM": "python",
            "OMP_NUM_THREADS": "1"}


def why_not():
    """What is missing for such containers here; None: nothing."""
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
