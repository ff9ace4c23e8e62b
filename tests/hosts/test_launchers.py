"""The launchers people use, over two emulated hosts (cluster.py) of two ranks: each must join them all, and results be exact.

Prints TAP. SHOAL_HOST_RANK names the program of a rank, SHOAL_COMMAND the command. Arguments: only cases whose names contain
one. A launcher that is missing is skipped. Exit code 0: none failed, 1: some failed."""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "multi"))

from cluster import INTERFACE, Cluster, Impossible, clean_environment, require  # noqa: E402
from slurm import Slurm  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

PROGRAM = os.path.abspath(os.environ.get("SHOAL_HOST_RANK", ""))
COMMAND = os.path.abspath(os.environ.get("SHOAL_COMMAND", ""))
RANK = [PROGRAM, "exact", "groups"]
RUN_S = 150  # far longer than a run takes: it ends a hang
HOSTS, RANKS_EACH = 2, 2
VARIABLES = {"SHOAL_LOG": "info", "SHOAL_SECRET": "secret"}
AS_ROOT = ["--allow-run-as-root"] if os.getuid() == 0 else []
OPENMPI = ("mpirun.openmpi", ["--mca", "plm_rsh_agent"])
MPICH = ("mpirun.mpich", ["-launcher", "rsh", "-iface", INTERFACE, "-launcher-exec"])

# PyTorch with a launcher that sets none of its variables (python/shoal/torch/_rendezvous.py).
TORCH = Path(COMMAND).parent / "torch/bin/python3"
TORCH_RANK = [str(TORCH), "-c", """
import torch, torch.distributed as dist
import shoal.torch
dist.init_process_group("shoal")
tensor = torch.full((1000,), float(1 + dist.get_rank()))
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {dist.get_node_local_rank()}: {tensor[999].item()}\\n", end="")
dist.destroy_process_group()
"""]
OF_TORCH = {"SHOAL_SECRET": "secret", "SHOAL_LIBRARY": str(Path(COMMAND).parent / "libshoal.so"), "SHOAL_TORCH_SHIM": "python",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "python")}
TORCH_S = 240  # all ranks import PyTorch at once


def expect_joined(code, told, launcher):
    """Every rank is done, and has joined in this way."""
    ranks = HOSTS * RANKS_EACH
    expect(code == 0 and told.count("exact: groups ") == ranks, f"exit code {code}", told)
    expect(f"{ranks} ranks on {HOSTS} hosts" in told and f"joined by {launcher};" in told, f"not joined by {launcher}", told)


def srun():
    """Runs srun by default, with PMI-1 and with PMIx, if this Slurm has them."""
    with Cluster(HOSTS) as cluster, Slurm(cluster) as slurm:
        known = slurm.srun("--mpi=list", timeout=RUN_S)
        for mpi, launcher in (("none", "srun"), ("pmi2", "PMI-1"), ("pmix", "PMIx")):
            if mpi in (known.stdout + known.stderr).split():
                done = slurm.srun(f"--mpi={mpi}", f"-N{HOSTS}", f"-n{HOSTS * RANKS_EACH}", *RANK, timeout=RUN_S, **VARIABLES)
                expect_joined(done.returncode, done.stdout + done.stderr, launcher)


def srun_of_bench():
    """The tasks are the bench's ranks; a single task is a shell in which it starts its own."""
    with Cluster(HOSTS) as cluster, Slurm(cluster) as slurm:
        for tasks, words, ranks in ((HOSTS, [], f"{HOSTS} ranks on {HOSTS} hosts"), (1, ["-n", "3"], "3 ranks on 1 host")):
            done = slurm.srun(f"-n{tasks}", f"-N{tasks}", COMMAND, "bench", "barrier", *words, timeout=RUN_S, **VARIABLES)
            expect(done.returncode == 0 and f"barrier, {ranks}\n" in done.stdout, ranks, done)


def expect_torch(done):
    """Ranks of each host have local numbers, and the sum is over all ranks."""
    ranks = HOSTS * RANKS_EACH
    for rank in range(ranks):
        line = f"rank {rank} of {ranks}, local rank {rank % RANKS_EACH}: {ranks * (ranks + 1) / 2}\n"
        expect(done.returncode == 0 and line in done.stdout, line, done.stdout, done.stderr)


def need_torch():
    if not TORCH.exists():
        raise Skip(f"{TORCH} is not here")


def srun_of_torch():
    need_torch()
    with Cluster(HOSTS) as cluster, Slurm(cluster) as slurm:
        expect_torch(slurm.srun("--mpi=none", f"-N{HOSTS}", f"-n{HOSTS * RANKS_EACH}", *TORCH_RANK, timeout=TORCH_S, **OF_TORCH))


def openmpi_of_torch():
    need_torch()
    passed_on = [word for name in OF_TORCH for word in ("-x", name)]
    expect_torch(mpirun(OPENMPI[0], [*AS_ROOT, *passed_on, *OPENMPI[1]], TORCH_RANK, OF_TORCH, TORCH_S))


def mpich_of_torch():
    need_torch()
    expect_torch(mpirun(*MPICH, TORCH_RANK, OF_TORCH, TORCH_S))


def mpirun(command, words, program, variables, timeout):
    """mpirun reaches the hosts by a program instead of ssh; words: those before that program's path."""
    if not shutil.which(command):
        raise Skip(f"{command} is not here")
    with Cluster(HOSTS) as cluster, tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "agent")
        agent.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve().with_name("cluster.py")} rsh "$@"\n')
        agent.chmod(0o755)
        hosts = ",".join(f"{cluster.address(number)}:{RANKS_EACH}" for number in range(HOSTS))
        return subprocess.run([*cluster.hosts[0].enter(), command, *words, agent, "--host", hosts, "-n",
                               str(HOSTS * RANKS_EACH), *program], capture_output=True, text=True, timeout=timeout,
                              stdin=subprocess.DEVNULL, env={**clean_environment(), **cluster.environment(), **variables})


def openmpi():
    passed_on = [word for name in VARIABLES for word in ("-x", name)]
    done = mpirun(OPENMPI[0], [*AS_ROOT, *passed_on, *OPENMPI[1]], RANK, VARIABLES, RUN_S)
    expect_joined(done.returncode, done.stdout + done.stderr, "PMIx")


def mpich():
    done = mpirun(*MPICH, RANK, VARIABLES, RUN_S)
    expect_joined(done.returncode, done.stdout + done.stderr, "PMI-1")


def torchrun():
    """torchrun's store passes on a secret, so rank 0 logs no warning."""
    command = shutil.which("torchrun", path=f"{os.environ['PATH']}:{Path(COMMAND).parent}/torch/bin")
    if not command:
        raise Skip("torchrun is not here")
    with Cluster(HOSTS) as cluster:
        agents = [subprocess.Popen([*host.enter(), command, "--no-python", "--nnodes", str(HOSTS), "--node-rank", str(number),
                                    "--nproc-per-node", str(RANKS_EACH), "--master-addr", cluster.address(0), "--master-port",
                                    "29500", "--", *RANK],
                                   env={**clean_environment(), "OMP_NUM_THREADS": "1", "SHOAL_LOG": "info"}, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                  for number, host in enumerate(cluster.hosts)]
        told = "".join(agent.communicate(timeout=RUN_S)[0] for agent in agents)
        expect_joined(sum(agent.returncode for agent in agents), told, "torchrun or shoal run")
        expect("without a secret" not in told, told)


def case(function):
    def run():
        try:
            function()
        except Impossible as why:
            raise Skip(str(why))
    run.__name__ = f"{function.__name__}_over_{HOSTS}_hosts"
    return run


def main():
    try:
        if not os.path.isfile(PROGRAM) or not os.path.isfile(COMMAND):
            raise Impossible("SHOAL_HOST_RANK and SHOAL_COMMAND do not name programs")
        require()
    except Impossible as why:
        print(f"1..0 # SKIP {why}")
        return 0
    cases = [case(function) for function in (srun, srun_of_bench, torchrun, openmpi, mpich, srun_of_torch, openmpi_of_torch, mpich_of_torch)]
    return run_cases([one for one in cases if not sys.argv[1:] or any(word in one.__name__ for word in sys.argv[1:])])


if __name__ == "__main__":
    main()
