"""Runs the programs that make a wheel. dev/wheels.py and dev/wheel_shims.py use it."""
import subprocess

TIMEOUT_S = 1200


class Failed(Exception):
    """A wheel could not be made; the text says why."""


def run(*words, **options):
    """Returns what a command prints. Raises Failed with its last lines."""
    words = [str(word) for word in words]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=TIMEOUT_S, **options)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise Failed(str(fault)) from None
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-30:])
        raise Failed(f"{last}\nexit code {done.returncode} from {' '.join(words[:6])}")
    return done.stdout
