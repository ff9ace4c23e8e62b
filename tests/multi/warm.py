"""An interpreter that has already imported torch. Importing torch costs a process two CPU seconds, forking one a hundredth
of that.

start() forks a server from this process. The server has all modules that the test program imported, and has started
nothing. start() returns the path of an executable that launchers and others can run like Python: `PATH script.py
ARGUMENTS`, `PATH -c TEXT`, `PATH -m MODULE`. The executable passes its arguments, environment, folder, cores and open files
to the server, which forks a process that becomes the program. The executable forwards signals, dies with the program and
the program with it, and ends as the program does: by sys.exit or an exception, after Python's usual cleanup and that of
libraries that the program loaded itself. A program that runs sys.executable gets this executable again. Tests of how Python
itself starts need the real interpreter.

start_other() does this in another interpreter, which first imports modules: it runs this file."""
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import pathlib
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
def is_open(file):
    try:
        return os.fstat(file)
    except OSError:
        return False  # it was the folder's that was listed
files = [file for file in map(int, os.listdir("/proc/self/fd")) if is_open(file)]
server = socket.socket(socket.AF_UNIX)
server.connect("{address}")
umask = os.umask(0)
asked = json.dumps([files, sys.argv, dict(os.environ), os.getcwd(), umask, sorted(os.sched_getaffinity(0))]).encode()
def pass_on(number, frame):
    try:
        server.send(bytes([number]))
    except OSError:
        pass  # the program has ended
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
socket.send_fds(server, [len(asked).to_bytes(4, "big")], files)
server.sendall(asked)
for file in files:
    os.close(file)  # else nobody would see that the program closes one
for number in PASSED_ON:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
code = int(server.recv(16) or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
HEAD_BYTES = 4
FILES_MAX = 253  # the most that the kernel passes in one message
ASKED_S = 60  # for the client to send its request
INTERPRETER = os.path.join(sys.prefix, "bin/python3")  # sys.executable may itself be a path that start() returned


def start(folder=None):
    """Returns the path of the executable, in the given folder or a new one. This process removes the folder when it ends."""
    folder = folder or tempfile.mkdtemp(prefix="shoal-warm-")
    os.makedirs(folder, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/server")
    listener.listen(64)
    alive, held = os.pipe()  # the pipe closes when this process and its forks have ended, and the server with it
    sys.stdout.flush()
    server = os.fork()
    if server == 0:
        os.close(held)
        Server(listener, alive).serve()
    atexit.register(end, os.getpid(), server, folder)
    os.close(alive)
    listener.close()
    client = pathlib.Path(folder, "python3")
    client.write_text(CLIENT.format(python=INTERPRETER, address=f"{folder}/server"))
    client.chmod(0o755)
    return str(client)


def end(starter, server, folder):
    """Runs in the process that started the server, not in its forks. Waits for the server, so that the CPU time of programs
    counts as this process's."""
    if os.getpid() == starter:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        shutil.rmtree(folder, ignore_errors=True)


def receive(client, count):
    """Returns `count` bytes, or fewer if the client has ended."""
    text = b""
    while len(text) < count and (more := client.recv(count - len(text))):
        text += more
    return text


class Server:
    def __init__(self, listener, alive):
        self.listener, self.alive = listener, alive
        self.children = {}  # pid -> (the client's connection, a descriptor that is readable once the child has ended)
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(alive, selectors.EVENT_READ)
        self.own_path = json.loads(subprocess.run([INTERPRETER, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
                                                  capture_output=True, check=True).stdout)

    def serve(self):
        """Returns in a forked process when its program has ended, or in the server when the process that started it has
        ended."""
        gc.freeze()  # else each program's last collection scans everything that was imported: a second each
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == self.alive:
                    os._exit(0)
                elif key.fileobj is self.listener:
                    self.answer()
                elif key.data in self.children and key.fileobj is self.children[key.data][0]:
                    self.pass_on(key.fileobj, key.data)
                elif key.data in self.children:
                    self.tell_end(key.data)

    def answer(self):
        """Forks a program for the next client, if it sends a valid request."""
        client, _ = self.listener.accept()
        client.settimeout(ASKED_S)
        files = []
        try:
            head, files, _, _ = socket.recv_fds(client, HEAD_BYTES, FILES_MAX)
            asked = json.loads(receive(client, int.from_bytes(head, "big")))
        except (OSError, ValueError):  # the client was killed meanwhile
            asked = None
        pid = os.fork() if asked else -1
        if pid == 0:
            self.close()
            client.close()
            become(files, self.own_path, *asked)
        for file in files:
            os.close(file)
        if asked:
            self.children[pid] = client, os.pidfd_open(pid)
            for file in self.children[pid]:
                self.selector.register(file, selectors.EVENT_READ, pid)

    def pass_on(self, client, pid):
        """Forwards a signal that the client got, or kills the program if the client has ended."""
        try:
            numbers = client.recv(16)
        except OSError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            self.selector.unregister(client)

    def tell_end(self, pid):
        client, ended = self.children.pop(pid)
        _, status = os.waitpid(pid, 0)
        for file in (client, ended):
            if file in self.selector.get_map():
                self.selector.unregister(file)
        try:
            client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        except OSError:
            pass  # the client was killed
        client.close()
        os.close(ended)

    def close(self):
        """Closes the server's descriptors in a child, so that the program finds none that it did not open and later loses
        none."""
        for client, ended in self.children.values():
            client.close()
            os.close(ended)
        self.selector.close()
        self.listener.close()
        os.close(self.alive)


def put(files, numbers):
    """Moves files to the descriptor numbers that they had in the client."""
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, numbers):
        os.dup2(file, number)
        os.close(file)


def options_take(words, environment):
    """Applies an interpreter's options; returns the arguments after them."""
    while words[0].startswith("-") and words[0] not in ("-c", "-m"):
        option, *words = words
        if option == "-u":
            environment["PYTHONUNBUFFERED"] = "1"
        elif option == "-B":
            sys.dont_write_bytecode = True
        elif option == "-W":
            warnings.simplefilter(words.pop(0))
        else:
            sys.exit(f"warm.py does not know the option {option}")
    return words


def leave_to_the_kernel():
    """Lets the kernel reclaim what the libraries loaded so far would free at exit. Otherwise each program of torch spends a
    tenth of a CPU second on removing torch's operators."""
    library = ctypes.CDLL(None)
    library.on_exit(library._exit, None)  # runs after handlers that are registered later, with the exit code


def become(files, own_path, numbers, words, environment, folder, umask, cores):
    """Turns this process into the program. Does not return."""
    leave_to_the_kernel()
    put(files, numbers)
    os.chdir(folder)
    os.umask(umask)
    os.sched_setaffinity(0, cores)
    sys.executable = words[0]
    if "multiprocessing.spawn" in sys.modules:  # it recorded the interpreter's path when it was imported
        sys.modules["multiprocessing.spawn"].set_executable(sys.executable)
    words = options_take(words[1:], environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
    go_on(words, [*filter(None, environment.get("PYTHONPATH", "").split(":")), *own_path])
    sys.exit(0)


def go_on(words, path):
    """Runs the script, text or module that the arguments name."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.path[:], sys.argv = [os.getcwd(), *path], words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        name, text, place, sys.argv = "<string>", words[1], "", ["-c", *words[2:]]
    else:
        main.__file__ = name = words[0]
        text, place, sys.argv = pathlib.Path(name).read_text(), str(pathlib.Path(name).resolve().parent), words
    sys.path[:] = [place, *path]
    exec(compile(text, name, "exec"), main.__dict__)


def start_other(python, *modules):
    """Like start(), but with another interpreter, which imports these modules."""
    process = subprocess.Popen([python, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(end_other, os.getpid(), process)
    for line in process.stdout:  # imported modules may also print
        if line.endswith("/python3\n"):
            return line.strip()
    raise RuntimeError(f"{python} cannot import {' '.join(modules)}")


def end_other(starter, process):
    if os.getpid() == starter:
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    print(start(), flush=True)
    sys.stdin.read()  # wait until the other process ends
