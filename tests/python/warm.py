"""An interpreter that has imported torch already. To import it takes a process two CPU seconds, and to fork one a hundredth of that.

start() forks a server from this process, which has what the test program imported and has started nothing. It gives the path
of an executable that launchers, and whoever else starts programs, take for Python: `PATH script.py ARGUMENTS` or `PATH -c TEXT`.
That one hands its arguments, environment, folder, cores and standard files over, and the server forks a process that goes on as
the program. It passes signals on, is killed with the program and the program with it, and ends as the program does: through
sys.exit or an exception, with Python's and C++'s own tidying up. A program that tests how Python itself begins, or that
inherits more than three descriptors, needs sys.executable."""
import atexit
import json
import os
import pathlib
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
server = socket.socket(socket.AF_UNIX)
server.connect("{address}")
umask = os.umask(0)
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), umask, sorted(os.sched_getaffinity(0))]).encode()
def pass_on(number, frame):
    try:
        server.send(bytes([number]))
    except OSError:
        pass  # the program has ended
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
server.sendall(asked)
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
ASKED_S = 60  # to say what is wanted


def start():
    """The path of the executable; it lies in a folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix="shoal-warm-")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/server")
    listener.listen(64)
    alive, held = os.pipe()  # ends for the server when this process and its forks have ended
    sys.stdout.flush()
    server = os.fork()
    if server == 0:
        os.close(held)
        Server(listener, alive).serve()
    atexit.register(end, os.getpid(), server, folder)
    os.close(alive)
    listener.close()
    client = pathlib.Path(folder, "python3")
    client.write_text(CLIENT.format(python=sys.executable, address=f"{folder}/server"))
    client.chmod(0o755)
    return str(client)


def end(starter, server, folder):
    """In the process that started the server, not in its forks. Waits for it, so that what programs took counts as this one's."""
    if os.getpid() == starter:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        shutil.rmtree(folder, ignore_errors=True)


def receive(client, count):
    """So many bytes, or fewer where the client has ended."""
    text = b""
    while len(text) < count and (more := client.recv(count - len(text))):
        text += more
    return text


class Server:
    def __init__(self, listener, alive):
        self.listener, self.alive = listener, alive
        self.children = {}  # pid -> (the client's connection, a descriptor that is readable when the child has ended)
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(alive, selectors.EVENT_READ)
        self.own_path = json.loads(subprocess.run([sys.executable, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
                                                  capture_output=True, check=True).stdout)

    def serve(self):
        """Leaves by the end of a program, in one of the forked processes; or with the process that started it."""
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
        """Forks a program for the next client, if it says what it wants."""
        client, _ = self.listener.accept()
        client.settimeout(ASKED_S)
        files = []
        try:
            head, files, _, _ = socket.recv_fds(client, HEAD_BYTES, 3)
            asked = json.loads(receive(client, int.from_bytes(head, "big")))
        except (OSError, ValueError):  # it was killed meanwhile
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
        """A signal that the client got, or its end."""
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
            pass  # it was killed
        client.close()
        os.close(ended)

    def close(self):
        """In a child: the program must find no descriptor that it did not open, and none may be closed under it later."""
        for client, ended in self.children.values():
            client.close()
            os.close(ended)
        self.selector.close()
        self.listener.close()
        os.close(self.alive)


def become(files, own_path, arguments, environment, folder, umask, cores):
    """This process goes on as the program. Does not return."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.umask(umask)
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.reconfigure(write_through=bool(environment.get("PYTHONUNBUFFERED")))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        name, text, place, sys.argv = "<string>", arguments[1], "", ["-c", *arguments[2:]]
    else:
        main.__file__ = name = arguments[0]
        text, place, sys.argv = pathlib.Path(name).read_text(), str(pathlib.Path(name).resolve().parent), arguments
    sys.path[:] = [place, *filter(None, environment.get("PYTHONPATH", "").split(":")), *own_path]
    exec(compile(text, name, "exec"), main.__dict__)
    sys.exit(0)
