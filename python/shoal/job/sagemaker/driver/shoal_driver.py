"""The driver of SageMaker's SDK v3 for shoal.job.sagemaker.Shoal. Every host of a training job runs it in its container, below
the SDK's start script. It starts the entry script as the workers of `shoal run`, and writes the reason of a failure to the file
that the platform reads. It is stored next to the SDK's own drivers there, and needs Shoal installed in the container."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import IO, Any, Dict, List, Tuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from common.utils import get_process_count, hyperparameters_to_cli_args, write_failure_file  # noqa: E402 the SDK's

REASON_MAX = 1024  # characters that the platform shows
LINES_MAX = 200  # of the output of `shoal run` that are kept
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
EXIT_NOT_FOUND = 127


class Mistake(Exception):
    """The message is one line: what is wrong and what to do."""


def shoal_command() -> List[str]:
    try:
        import shoal
        return [str(shoal.command_path())]
    except (ImportError, FileNotFoundError) as error:
        raise Mistake(f"the container has no Shoal for {sys.executable} ({error}): name shoal in the requirements file of "
                      "source_code, or install it in the image") from None


def script_command(variables: Dict[str, str]) -> List[str]:
    """Returns the command that starts the script as the SDK's own drivers do: with the hyperparameters as arguments."""
    script = variables["SM_ENTRY_SCRIPT"]
    arguments = hyperparameters_to_cli_args(json.loads(variables["SM_HPS"]))
    if script.endswith(".py"):
        return [sys.executable, script, *arguments]
    if script.endswith(".sh"):
        return ["/bin/sh", script, *arguments]
    raise Mistake(f"entry_script is {script}: it must end in .py or .sh")


def run_command(settings: Dict[str, Any], variables: Dict[str, str]) -> List[str]:
    """Returns the command `shoal run` of this host."""
    hosts, port = int(variables["SM_HOST_COUNT"]), variables["SM_MASTER_PORT"]
    words = [*shoal_command(), "run", "--hosts", str(hosts), "--host-index", variables["SM_CURRENT_HOST_RANK"],
             "-n", str(get_process_count(settings.get("process_count_per_node")))]
    if hosts > 1:
        words += ["--meet", f"{variables['SM_MASTER_ADDR']}:{port}"]
    return [*words, *(settings.get("run_options") or []), "--", *script_command(variables)]


def relay(errors: IO[str], kept: List[str]) -> None:
    """Passes on the stderr of `shoal run`, and keeps its last lines."""
    for line in errors:
        sys.stderr.write(line)
        sys.stderr.flush()
        kept.append(line)
        del kept[:-LINES_MAX]


def run(command: List[str]) -> Tuple[int, List[str]]:
    """Returns the exit code, as a shell has it, and the last lines of stderr. Passes on signals."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: process.send_signal(number))
    kept: List[str] = []
    reader = threading.Thread(target=relay, args=(process.stderr, kept), daemon=True)
    reader.start()
    code = process.wait()
    reader.join(10)  # a process that a worker left running may hold the pipe
    return (code if code >= 0 else 128 - code), kept


def reason_of(code: int, kept: List[str]) -> str:
    """Returns the report of `shoal run` from the line that names the cause; else its last message; else the last lines."""
    said = [number for number, line in enumerate(kept) if line.startswith("shoal run: ")]
    blamed = [number for number in said if " failed first: " in kept[number] or "the rank to blame is on" in kept[number]]
    report = kept[blamed[0]:] if blamed else kept[said[-1]:] if said else kept[-20:]
    return ("".join(report).strip() or f"shoal run exited with code {code} and said nothing")[:REASON_MAX]


def main() -> int:
    try:
        settings = json.loads(os.environ["SM_DISTRIBUTED_CONFIG"])
        os.environ.setdefault("SHOAL_SECRET", settings["secret"])
        command = run_command(settings, dict(os.environ))
    except (Mistake, KeyError, ValueError) as error:
        text = f"the variable {error} is not set: start this by the SDK" if isinstance(error, KeyError) else str(error)
        print(f"shoal_driver: {text}", file=sys.stderr)
        write_failure_file(text[:REASON_MAX])
        return EXIT_NOT_FOUND
    code, kept = run(command)
    if code:
        write_failure_file(reason_of(code, kept))
    return code


if __name__ == "__main__":
    sys.exit(main())
