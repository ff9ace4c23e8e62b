"""The other ranks learn how a rank ended even before its launcher has reaped it.

Prints TAP. SHOAL_COMMAND names the command, SHOAL_ENDING_PROBE the program. Exit code 0: none failed, 1: some did."""
import os
import signal
import subprocess

from tap import COUNT_A_KILL, Skip, call, call_counted, expect, free_port, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
PROBE = os.environ["SHOAL_ENDING_PROBE"]
USER, GROUP, OTHER_GROUP = "65534", "65534", "65533"


def environment(**more):
    launchers = ("RANK", "WORLD_SIZE", "MASTER_", "PMI", "SHOAL_", "LOCAL_")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(launchers)}, **more}


def told(how, *identity):
    """Returns rank 0's report of how rank 1 ended, while nobody reaps rank 1."""
    job = {"SHOAL_JOB_ID": "ended", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    victim, survivor = (subprocess.Popen([PROBE, str(how), *identity], env=environment(RANK=rank, **job), text=True,
                                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                        for rank in "10")
    try:
        out, err = survivor.communicate(timeout=60)
    finally:
        survivor.kill()
        survivor.wait()
        victim.kill()
        victim.wait()
        victim.stdout.close()
        victim.stderr.close()
    if survivor.returncode == 77:
        raise Skip("cannot become another user")
    expect(survivor.returncode == 0, out, err)
    return out


def under_shoal_run_the_signal_is_told():
    code, out, err = call(SHOAL, "run", "-n", "2", PROBE, -signal.SIGSEGV, env=environment())
    expect("rank 1 (process " in out and "was killed by signal 11" in out, code, out, err)


def under_shoal_run_the_exit_code_is_told():
    code, out, err = call(SHOAL, "run", "-n", "2", PROBE, 3, env=environment())
    expect("exited with code 3" in out, code, out, err)


def lack_of_memory_is_told():
    code, out, err = call_counted(SHOAL, "run", "-n", "2", PROBE, -signal.SIGKILL, env=environment(ENDING_PROBE_COUNTS=COUNT_A_KILL))
    expect("was killed by signal 9 (Killed), probably for lack of memory (the kernel's oom_kill counter rose)" in out, code, out, err)
    code, out, err = call_counted(SHOAL, "run", "-n", "2", PROBE, -signal.SIGKILL, env=environment())
    expect("was killed by signal 9" in out and "memory" not in out, code, out, err)


def uncollected_signals_are_told():
    for number in (signal.SIGSEGV, signal.SIGKILL):
        expect(f"was killed by signal {int(number)}" in told(-number))


def uncollected_exit_codes_are_told():
    for code in (0, 3, 255):
        out = told(code)
        expect(f"exited with code {code}," in out, out)


def uncollected_is_told_to_an_ordinary_user():
    for how, words in ((-signal.SIGSEGV, "was killed by signal 11"), (3, "exited with code 3"), (0, "exited with code 0")):
        out = told(how, USER, GROUP, GROUP)
        expect(words in out, out)


def uncollected_and_hidden_is_not_taken_for_a_0():
    """If a rank has another group, the kernel hides its exit code."""
    out = told(3, USER, GROUP, OTHER_GROUP)
    expect("ended (its launcher has not collected it, so the reason is not known)" in out, out)


if __name__ == "__main__":
    run_cases([under_shoal_run_the_signal_is_told, under_shoal_run_the_exit_code_is_told, lack_of_memory_is_told,
               uncollected_signals_are_told,
               uncollected_exit_codes_are_told, uncollected_is_told_to_an_ordinary_user,
               uncollected_and_hidden_is_not_taken_for_a_0])
