"""A C program gets its job's secret from torchrun's store: torch's TCPStore with either backend, and torchrun itself.

Prints TAP. SHOAL_PROBE names launcher_probe. Exit code 0: none failed, 1: some did."""
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

from torch.distributed import TCPStore

from tap import expect, free_port, run_cases

PROBE = os.environ["SHOAL_PROBE"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "PMI", "SHOAL_SECRET", "SHOAL_JOB", "LOCAL_", "SLURM_", "OMPI_", "TORCHELASTIC_")


def environment(**more):
    return {**{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}, **more}


def start(rank, port, **more):
    return subprocess.Popen([PROBE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="none", **more))


def join(port, *others):
    ranks = [start(0, port), start(1, port, **dict(others))]
    told = [rank.communicate(timeout=60) for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(out + err for out, err in told)


def a_secret_comes_from_the_store():
    for uses_libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=uses_libuv)
        for _ in range(2):
            codes, text = join(store.port)
            expect(codes == [0, 0] and text.count("with a secret") == 2, uses_libuv, codes, text)
        store.set("other", "value")
        expect(store.get("other") == b"value", "the store is disturbed")


def a_rank_that_took_another_secret_is_refused():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes, text = join(store.port, ("SHOAL_SECRET", "another"), ("SHOAL_BOOTSTRAP_TIMEOUT_MS", "5000"))
    expect(codes[1] == 1 and "secret is not rank 0's" in text, codes, text)


def a_rank_without_libsodium_goes_without_a_secret_or_says_what_to_install():
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libsodium.so.23", "libsodium.so.26", "libsodium.so"):
            (pathlib.Path(folder) / name).write_text("no library")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        first = start(0, store.port, LD_LIBRARY_PATH=folder)
        key = "shoal/secret/none/0"  # torch prepends a /
        store.wait([key])
        expect(store.get(key) == b"none", store.get(key))
        ranks = [first, start(1, store.port)]
        told = [rank.communicate(timeout=60) for rank in ranks]
        expect([rank.returncode for rank in ranks] == [0, 0] and "with a secret" not in str(told), told)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set(key, "s" * 32)
        last = start(1, store.port, LD_LIBRARY_PATH=folder)
        text = "".join(last.communicate(timeout=60))
        expect(last.returncode == 1 and "install libsodium23 on this host" in text, last.returncode, text)


def state_of(process):
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def ranks_that_are_stopped_while_the_store_is_silent_get_its_answer():
    """SIGSTOP interrupts a wait at a socket with a time limit, like a signal with a handler."""
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        store.listen()
        store.settimeout(60)
        ranks = [start(rank, store.getsockname()[1]) for rank in range(2)]
        connections = [store.accept()[0] for _ in ranks]
        for connection in connections:
            expect(connection.recv(4096), "no question came")
        time.sleep(0.2)  # by then they usually wait for the answer
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
            while state_of(rank) not in "TZ":
                time.sleep(0.01)
            rank.send_signal(signal.SIGCONT)
        for connection in connections:
            connection.sendall(struct.pack("=Q", 32) + b"s" * 32)
        told = "".join(out + err for out, err in [rank.communicate(timeout=60) for rank in ranks])
        for connection in connections:
            connection.close()
        expect([rank.returncode for rank in ranks] == [0, 0] and told.count("with a secret") == 2, told)


def without_a_store_ranks_join_without_a_secret():
    codes, text = join(free_port())
    expect(codes == [0, 0] and "with a secret" not in text, codes, text)


def torchrun_hands_one_out():
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node", "2", PROBE],
                          capture_output=True, text=True, timeout=120, env=environment())
    expect(done.returncode == 0 and done.stdout.count("with a secret") == 2, done.returncode, done.stdout, done.stderr)


run_cases([ranks_that_are_stopped_while_the_store_is_silent_get_its_answer, a_secret_comes_from_the_store, a_rank_that_took_another_secret_is_refused,
           a_rank_without_libsodium_goes_without_a_secret_or_says_what_to_install,
           without_a_store_ranks_join_without_a_secret, torchrun_hands_one_out])
