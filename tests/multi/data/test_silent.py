"""Services that never answer while ranks join: a name server, the launcher's PMIx, a program at rank 0's port. Each must
cause a clear error within the configured time.

Prints TAP. SHOAL_PROBE names launcher_probe; SHOAL_TEST_RESOLVER and SHOAL_TEST_PMIX name the mocks. Exit code 0: none
failed."""
import os
import signal
import socket
import subprocess
import time

from tap import Skip, expect, free_port, handles, run_cases

PROBE = os.environ["SHOAL_PROBE"]
COMMAND = os.environ["SHOAL_COMMAND"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "PMI", "SHOAL_", "LOCAL_", "SLURM_", "OMPI_", "TORCHELASTIC_")


def variables_of_no_launcher(**others):
    return {**{name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}, **others}


def names_after(ms):
    """Sets up a name server that answers after this many milliseconds."""
    return {"LD_PRELOAD": os.environ["SHOAL_TEST_RESOLVER"], "MOCK_RESOLVER_MS": str(ms), "MOCK_NAMES": "far=127.0.0.1",
            "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}


def probe(within, **variables):
    """Returns the probe's exit code and output. It must end within `within` seconds; the hung call itself would last 30 s
    or forever."""
    env = variables_of_no_launcher(SHOAL_BOOTSTRAP_TIMEOUT_MS="700", **variables)
    begin = time.monotonic()
    done = subprocess.run([PROBE], env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    took = time.monotonic() - begin
    expect(took < within, f"it took {took:.1f} s", done.stderr)
    return done.returncode, done.stdout + done.stderr


def refused(*said, within=25, **variables):
    code, text = probe(within, **variables)
    expect(code == 1, code, text)
    for words in said:
        expect(words in text, words, text)


def pmix(hangs, size="2"):
    folder = os.environ.get("SHOAL_TEST_PMIX")
    if not folder:
        raise Skip("built without PMIx")
    return {"LD_LIBRARY_PATH": folder, "PMIX_NAMESPACE": "mock", "MOCK_PMIX_HANGS": hangs, "MOCK_PMIX_SIZE": size}


def a_name_server_that_does_not_answer_is_an_error():
    for rank in "01":
        refused('the host name "far" in MASTER_ADDR cannot be looked up: no answer in time', RANK=rank, WORLD_SIZE="2",
                MASTER_ADDR="far", MASTER_PORT="29500", **names_after(30_000))


def agents_of_two_hosts(meeting_timeout, port=29500, names_ms=30_000):
    words = ["run", "--hosts", "2", "--meet", f"far:{port}", "--meet-timeout", meeting_timeout, "-n", "1"]
    return [subprocess.Popen([COMMAND, *words, "--host-index", host, "true"], env=variables_of_no_launcher(**names_after(names_ms)),
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for host in "01"]


def agents_whose_name_server_is_slow_meet():
    for agent in agents_of_two_hosts("60", free_port(), 1_500):
        text, _ = agent.communicate(timeout=60)
        expect(agent.returncode == 0, agent.returncode, text)


def agents_whose_name_server_does_not_answer_give_up_in_time():
    begin = time.monotonic()
    for host, agent in enumerate(agents_of_two_hosts("1")):
        text, _ = agent.communicate(timeout=60)
        took = time.monotonic() - begin
        expect(agent.returncode == 125 and "cannot be looked up: no answer from the name server" in text and took < 20, host, agent.returncode, took, text)


def agents_whose_name_server_does_not_answer_hear_signals():
    agents = agents_of_two_hosts("300")
    while not all(handles(agent.pid, signal.SIGINT) for agent in agents):
        time.sleep(0.01)
    time.sleep(1)  # by then the ranks usually wait for the name server
    begin = time.monotonic()
    for agent in agents:
        agent.send_signal(signal.SIGINT)
    for host, agent in enumerate(agents):
        text, _ = agent.communicate(timeout=60)
        took = time.monotonic() - begin
        expect(agent.returncode == 130 and took < 20, host, agent.returncode, took, text)


def a_pmix_server_that_does_not_answer_is_an_error():
    for hangs in ("init", "size"):
        refused("the launcher's PMIx server does not answer PMIx_Init and PMIx_Get", "within 700 ms", **pmix(hangs))


def a_pmix_server_that_stops_to_answer_is_an_error():
    refused("PMIx_Get", "is the launcher still there", **pmix("get"))


def a_pmix_server_that_does_not_let_go_is_left_alone():
    code, text = probe(25, **pmix("finalize", "1"))
    expect(code == 0 and "PMIx_Finalize has not ended within 5000 ms and is left alone" in text, code, text)


def a_pmix_of_too_many_ranks_names_the_limit():
    refused("PMIx: the number of ranks is 16385, but may be 1 to 4096", **pmix("", "16385"))


def a_torchrun_whose_store_never_answers_is_an_error():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        refused("torchrun's store at 127.0.0.1", "did not answer", "or set SHOAL_SECRET alike on all ranks", RANK="1",
                WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(silent.getsockname()[1]),
                TORCHELASTIC_USE_AGENT_STORE="True")


def a_program_that_never_answers_at_rank_0s_port_is_an_error():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        port = silent.getsockname()[1]
        there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SHOAL_STORE_PORT": str(port)}
        refused("rank 0 of 2 did not come within 700 ms", "no answer in time", RANK="1", **there)
        refused(f"port {port} in use by other programs", RANK="0", **there)


run_cases([a_name_server_that_does_not_answer_is_an_error, agents_whose_name_server_does_not_answer_give_up_in_time,
           agents_whose_name_server_does_not_answer_hear_signals, agents_whose_name_server_is_slow_meet, a_pmix_server_that_does_not_answer_is_an_error,
           a_pmix_server_that_stops_to_answer_is_an_error, a_pmix_server_that_does_not_let_go_is_left_alone,
           a_pmix_of_too_many_ranks_names_the_limit, a_torchrun_whose_store_never_answers_is_an_error,
           a_program_that_never_answers_at_rank_0s_port_is_an_error])
