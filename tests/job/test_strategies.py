#!/usr/bin/env python3
"""The environment of scripts for each `distribution`: TF_CONFIG with reserved ports, variables of
smdistributed.modelparallel, mpi."""
import os
import re
import socket
import threading
import time

from shoal.job import processes
from shoal.job.engines import agent, cluster
from jobs import Jobs, Machines, names_in, where
from tap import expect, run_cases

# Each task listens at its own port, sends its name to all others, and receives theirs.
TASK = """
    import json, os, socket, sys, time

    config = json.loads(os.environ["TF_CONFIG"])
    tasks = {(kind, index): address for kind, addresses in config["cluster"].items() for index, address in enumerate(addresses)}
    own = (config["task"]["type"], config["task"]["index"])
    server = socket.create_server(("", int(tasks[own].rpartition(":")[2])))
    server.settimeout(60)

    def connect(task):
        host, _, port = tasks[task].rpartition(":")
        until = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection((host, int(port)), 60)
            except ConnectionRefusedError:
                assert time.monotonic() < until, task
                time.sleep(0.05)

    def greet(task):
        with connect(task) as connection:
            if task[0] == "ps":
                return connection.makefile().readline().split()
            connection.sendall(json.dumps([*own, os.getpid()]).encode())

    for task in tasks:
        if task != own:
            assert greet(task) in (None, ["ps", str(task[1])]), task
    heard = {}
    while len(heard) < sum(task != own and task[0] != "ps" for task in tasks):
        with server.accept()[0] as connection:
            kind, index, pid = json.loads(connection.makefile().read())
            heard[kind, index] = pid
    print("I am", *own, "of", len(tasks), "and met", *(f"{kind}-{index}" for kind, index in sorted(heard)), flush=True)
    open(os.path.join(os.environ["SM_MODEL_DIR"], "-".join(map(str, own))), "w").write("x")

    def is_there(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    if own[0] == "master":  # the servers of hosts whose script has ended serve on
        until = time.monotonic() + 60
        while any(is_there(pid) for pid in heard.values()):
            assert time.monotonic() < until, heard
            time.sleep(0.02)
        assert all(greet(task) for task in tasks if task[0] == "ps")
        print("all servers are still there")
"""
# The part of TensorFlow that shoal.job.engines.cluster uses: a server that prints its name.
TENSORFLOW = """
    import socket, types

    class Server:
        def __init__(self, cluster, job_name, task_index):
            self.told = f"{job_name} {task_index}\\n".encode()
            self.server = socket.create_server(("", int(cluster[job_name][task_index].rpartition(":")[2])))

        def join(self):
            while True:
                with self.server.accept()[0] as connection:
                    connection.sendall(self.told)

    train = types.SimpleNamespace(ClusterSpec=dict)
    distribute = types.SimpleNamespace(Server=Server)
"""
PARAMETER_SERVER = {"parameter_server": {"enabled": True}}
MIRRORED = {"multi_worker_mirrored_strategy": {"enabled": True}}


def with_tensorflow(jobs, text=TENSORFLOW):
    jobs.environment["PYTHONPATH"] = os.pathsep.join([str(jobs.write("../stand-in/tensorflow.py", text).resolve().parent),
                                                      os.environ["PYTHONPATH"]])


def workers_of_the_mirrored_strategy_reach_each_other():
    with Jobs() as jobs:
        jobs.run(TASK, instance_count=3, distribution=MIRRORED, framework="tensorflow")
        told = sorted(re.findall(r"I am (.*)$", jobs.out, re.M))
        expect(told == ["worker 0 of 3 and met worker-1 worker-2", "worker 1 of 3 and met worker-0 worker-2",
                        "worker 2 of 3 and met worker-0 worker-1"], jobs.out, jobs.err)
        expect(names_in(jobs.folder() / "model.tar.gz") == ["worker-0", "worker-1", "worker-2"], jobs.told())


def parameter_servers_serve_until_the_master_has_ended():
    with Jobs() as jobs:
        with_tensorflow(jobs)
        jobs.run(TASK, instance_count=2, distribution=PARAMETER_SERVER, framework="tensorflow")
        told = sorted(re.findall(r"^(algo-\d).*I am (.*)$", jobs.out, re.M))
        expect(told == [("algo-1", "master 0 of 4 and met worker-0"), ("algo-2", "worker 0 of 4 and met master-0")],
               jobs.out, jobs.err)
        expect("all servers are still there" in jobs.log(), jobs.told())
        jobs.wait_for_silence()


def machines_without_a_common_folder_find_each_other():
    with Jobs() as jobs:
        port = processes.free_port()
        document = jobs.document(TASK, instance_count=2, distribution=MIRRORED, where=where(shared=False, port=port))
        machines = Machines(jobs, document, 2, of_machine=lambda index: {
            "SHOAL_JOBS": str(jobs.jobs / str(index)), "SHOAL_SECRET": "known to both", "SHOAL_HOST_ID": str(index)})
        done = machines.wait()
        expect([code for code, _, _ in done] == [0, 0], done)
        expect(["I am worker 0 of 2 and met worker-1" in done[0][1], "I am worker 1 of 2 and met worker-0" in done[1][1]]
               == [True, True], done)


def parameter_server_on_one_host_is_one_script():
    with Jobs() as jobs:
        jobs.run("import os; print('config', os.environ.get('TF_CONFIG'))", distribution=PARAMETER_SERVER)
        expect("config None\n" in jobs.out, jobs.out, jobs.err)


def script_of_a_strategy_that_fails_is_named():
    script = ("import os\nif os.environ['SM_CURRENT_HOST'] == 'algo-2': raise ValueError('no data')\n"
              "import time; time.sleep(600)")
    with Jobs() as jobs:
        status = jobs.run(script, instance_count=2, distribution=MIRRORED, framework="tensorflow", code=1)
        expect(re.match(r"algo-2: rank 1 exited with (code|status) 1: ValueError: no data$", status["failure_reason"]), status)


def server_without_tensorflow_is_told():
    with Jobs() as jobs:
        with_tensorflow(jobs, "raise ImportError('there is none')")
        status = jobs.run("import time; time.sleep(600)", instance_count=2, distribution=PARAMETER_SERVER, code=1)
        expect("distribution.parameter_server: the server needs TensorFlow for " in
               jobs.log() + jobs.log(host="algo-2"), jobs.told())
        expect(re.match(r"algo-\d: rank \d exited with (code|status) 1", status["failure_reason"]), status)


MODEL_PARALLEL = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 1, "microbatches": 4}}}}


def parameters_of_modelparallel_reach_the_script():
    script = """
        import os, sys
        print("told", os.environ["SM_HP_MP_PARAMETERS"], sys.argv[1:], [name in os.environ for name in (
              "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID")], "of", os.environ["WORLD_SIZE"])
    """
    for beside, variables in (({"mpi": {"enabled": True, "processes_per_host": 2}}, "[True, False]"),
                              ({"torch_distributed": {"enabled": True}, "mpi": {"enabled": False, "processes_per_host": 2}},
                               "[False, True]")):
        with Jobs() as jobs:
            jobs.run(script, distribution={**MODEL_PARALLEL, **beside}, framework="pytorch")
            told = """told {"microbatches":4,"partitions":1} ['--mp_parameters', 'microbatches=4,partitions=1'] """
            expect(jobs.out.count(f"{told}{variables} of 2") == 2, jobs.out, jobs.err)


def parameters_that_are_not_served_are_refused():
    parameters = {"partitions": 2, "pipeline": "simple", "load_partition": False, "horovod": True, "pipelines": 3}
    distribution = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, "mpi": {"enabled": True}}
    with Jobs() as jobs:
        code, out, err = jobs.call("run", jobs.document("print('never')", distribution=distribution))
        for name, text in (("horovod", "true is not served: leave it out, or write false;"),
                           ("pipelines", 'unknown parameter; did you mean "pipeline"?')):
            expect(f"distribution.smdistributed.modelparallel.parameters.{name}: {text}" in err, name, err)
        expect(code == 2 and not jobs.jobs.exists() and "partitions" not in err, code, out, err)


def mpi4py_that_no_mpirun_starts_is_refused():
    mpi = {"mpi": {"enabled": True, "processes_per_host": 2}}
    with Jobs() as jobs:
        jobs.write("words/inner.py", "if True:\n    from mpi4py import MPI\n")
        status = jobs.run("import words.inner", distribution=mpi, code=1)
        expect(re.match(r"distribution.mpi: words/inner.py imports mpi4py, but `shoal run` starts the workers, .* each of "
                        r"the 2 workers would be alone in its MPI_COMM_WORLD: use Shoal or torch.distributed in the script, or start it by mpirun itself",
                        status["failure_reason"]), status)
    with Jobs() as jobs:
        jobs.run("try:\n    import mpi4py\nexcept ImportError:\n    pass\nprint('trained')", distribution=mpi)
        jobs.write("inner.py", "import mpi4py_stubs, mpi4python\nfrom . import mpi4py")
        expect(agent.mpi4py_import(jobs.root / "source") is None, "another package")


def held_port_is_given_to_no_other():
    """TensorFlow's and Python's servers set SO_REUSEADDR and may listen. A socket without it cannot take the port."""
    with cluster.port_hold(socket.AF_INET) as held:
        port = held.getsockname()[1]
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", port))
                expect(False, "another socket took the port")
            except OSError:
                pass
        socket.create_server(("127.0.0.1", port)).close()
        with socket.socket(socket.AF_INET6) as both:  # as gRPC does
            both.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            both.bind(("::", port))
            both.listen()


def chosen_ports_are_given_to_no_other():
    """Neither by this function, nor by `shoal run`, nor by other tests: all lock a slot by the same name. A slot with a server on one
    of its ports is left out, also if the server has no name of a slot."""
    own = processes.free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        try:
            other.bind(f"\0shoal-run-port-{own}")
            expect(False, "the slot is not locked")
        except OSError:
            pass
    before, processes.SLOTS = processes.SLOTS, range(own, own + 1)
    try:
        for first in (own, own + 1):  # nobody locks the second one
            processes.SLOTS = range(first, first + 1)
            with socket.create_server(("127.0.0.1", own + 9)):
                try:
                    expect(False, processes.free_port())
                except OSError as error:
                    expect(f"no 17 free ports in a row from {first} to {first}" in str(error), error)
    finally:
        processes.SLOTS = before


def strangers_are_refused():
    """Some send nothing, some nonsense, and one has another secret. The first host still meets the others."""
    port = processes.free_port()
    first = cluster.Meeting("multi_worker_mirrored_strategy", 0, 2, "127.0.0.1", port, b"right")
    told = []
    thread = threading.Thread(target=lambda: told.append(cluster.meet(first, [1])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    silent = [cluster._connect(first, deadline) for _ in range(20)]  # each alone would delay the first host by ten seconds
    for words in (b"GET / HTTP/1.0\n", b'{"index":' + 100_000 * b"[" + b"\n", b"{}\n{}\n", b"7\n", b"x" * 100_000):
        with cluster._connect(first, deadline) as stranger:
            stranger.sendall(words)
    dripping = cluster._connect(first, deadline)
    dripping.sendall(b"{")
    began = time.monotonic()
    try:
        cluster.meet(cluster.Meeting(first.style, 1, 2, "127.0.0.1", port, b"wrong"), [2])
        expect(False, "another secret was taken")
    except cluster.ClusterError as error:
        expect(re.match(r"no answer from host 0 at 127.0.0.1:\d+, so the other hosts' addresses are unknown: the connection was closed",
                        str(error)), error)
    members, connections = cluster.meet(cluster.Meeting(first.style, 1, 2, "127.0.0.1", port, b"right"), [2])
    thread.join(60)
    expect(time.monotonic() - began < 5 * cluster.TALK_S, "one stranger after the other was waited for")
    for connection in [*silent, dripping]:
        connection.close()
    expect(members == told[0][0] == [cluster.Member("127.0.0.1", [1]), cluster.Member("127.0.0.1", [2])], members, told)
    for connection in [*connections, *told[0][1]]:
        connection.close()


CASES = [workers_of_the_mirrored_strategy_reach_each_other, parameter_servers_serve_until_the_master_has_ended,
         machines_without_a_common_folder_find_each_other, parameter_server_on_one_host_is_one_script,
         script_of_a_strategy_that_fails_is_named, server_without_tensorflow_is_told,
         parameters_of_modelparallel_reach_the_script, parameters_that_are_not_served_are_refused,
         mpi4py_that_no_mpirun_starts_is_refused, held_port_is_given_to_no_other, chosen_ports_are_given_to_no_other,
         strangers_are_refused]
run_cases(CASES)
