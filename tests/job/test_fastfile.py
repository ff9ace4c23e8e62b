#!/usr/bin/env python3
"""FastFile: names and sizes before the start, bytes when a file is opened, by whatever program and in whatever way; without
root."""
import os
import pathlib
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

from shoal.job import channels, fastfile  # noqa: E402
from shoal.job.document import Channel  # noqa: E402
from stores import S3, Said, channel_folder, files_below, job_folder  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

s3 = S3()


class Laid:
    """A job with a channel of mode FastFile below s3://data/PREFIX/."""

    def __init__(self, job, prefix):
        self.job, self.folder, self.prefix = job, channel_folder(job), prefix
        self.said = Said()
        s3.proxy.forget()
        channels.channel_bring(Channel(f"s3://data/{prefix}/", input_mode="FastFile"), self.folder, 0, 1, self.said)

    def run(self, *words, code=0, **more):
        """The output of a command that runs as a worker does."""
        with fastfile.View(self.folder.parent, self.said) as view:
            done = subprocess.run(view.command([str(word) for word in words]), pass_fds=view.pass_fds, capture_output=True,
                                  timeout=120, stdin=subprocess.DEVNULL, **more)
        expect(done.returncode == code, done.returncode, done.stdout, done.stderr, self.said)
        return done.stdout.decode()

    def python(self, body, **more):
        return self.run(sys.executable, "-c", body, cwd=self.folder, **more)

    def asked(self):
        """The objects that came, each as often as it was asked for."""
        return sorted(path.rsplit("/", 1)[-1] for path in s3.proxy.gets(f"/{self.prefix}/"))


def put(prefix, **files):
    for name, body in files.items():
        s3.put(f"{prefix}/{name}", body)


def works_here():
    reason = fastfile.why_not()
    if reason:
        raise Skip(f"no FastFile here: {reason}")


def names_and_sizes_are_there_and_bytes_come_when_asked():
    works_here()
    put("view", a=b"1" * 1000, b=b"2" * 2000, c=b"3" * 3000, none=b"")
    with job_folder() as job:
        laid = Laid(job, "view")
        expect(laid.asked() == [] and "each brought when it is opened first" in laid.said[0], laid.said)
        sizes = {path.name: path.stat().st_size for path in laid.folder.iterdir()}
        expect(sizes == {"a": 1000, "b": 2000, "c": 3000, "none": 0}, sizes)
        out = laid.python("import os; print(len(os.listdir('.')), os.path.getsize('b'), open('b').read() == '2' * 2000, "
                          "open('none').read() == '')")
        expect(out.split() == ["4", "2000", "True", "True"], out)
        expect(laid.asked() == ["b"] and "1 of 3 objects were opened, 2.0 kB came" in laid.said[-1], laid.asked(), laid.said)


def it_does_not_matter_how_a_file_is_opened():
    """By name, relative, by a folder's descriptor, through a link, as an array, from C, by a program with an empty
    environment."""
    works_here()
    names = ["plain", "relative", "at", "linked", "mapped", "fopen", "cat", "shell", "update", "again"]
    put("ways", **{name: name.encode() * 700 for name in names})
    with job_folder() as job, tempfile.TemporaryDirectory() as elsewhere:
        laid = Laid(job, "ways")
        os.symlink(laid.folder, f"{elsewhere}/data")
        out = laid.python(f"""
import ctypes, mmap, os, subprocess
top = {str(laid.folder)!r}
def read(descriptor):
    return os.read(descriptor, 1 << 20)
got = {{}}
got['plain'] = open(top + '/plain', 'rb').read()
got['relative'] = open('../training/./relative', 'rb').read()
got['at'] = read(os.open('at', os.O_RDONLY, dir_fd=os.open('..//training', os.O_RDONLY | os.O_DIRECTORY)))
got['linked'] = open({elsewhere!r} + '/data/linked', 'rb').read()
got['mapped'] = bytes(mmap.mmap(os.open('mapped', os.O_RDONLY), 0, prot=mmap.PROT_READ))
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file, buffer = libc.fopen(b'fopen', b'r'), ctypes.create_string_buffer(1 << 16)
count = libc.fread(buffer, 1, 1 << 16, ctypes.c_void_p(file))
got['fopen'] = buffer.raw[:count]
got['cat'] = subprocess.run(['/bin/cat', 'cat'], env={{}}, stdout=subprocess.PIPE).stdout
got['shell'] = subprocess.run('cat < shell', shell=True, stdout=subprocess.PIPE).stdout
got['update'] = open('update', 'r+b').read() if os.geteuid() == 0 else b'update' * 700
got['again'] = open('again', 'rb').read() + open('again', 'rb').read()
print([name for name, data in got.items() if data != name.encode() * (1400 if name == 'again' else 700)], len(got))
""")
        expect(out.split() == ["[]", "10"], out)
        expect(laid.asked() == sorted(names if os.geteuid() == 0 else names[:8] + names[9:]), laid.asked())


def arrays_and_tensors_read_it():
    works_here()
    import io

    import numpy
    import torch
    data = io.BytesIO()
    numpy.save(data, numpy.arange(500))
    tensors = io.BytesIO()
    torch.save({"w": torch.arange(700)}, tensors)
    put("arrays", **{"x.npy": data.getvalue(), "m.npy": data.getvalue(), "w.pt": tensors.getvalue(), "v.pt": tensors.getvalue(),
                     "raw": numpy.arange(300).tobytes()})
    with job_folder() as job:
        laid = Laid(job, "arrays")
        out = laid.python("""
import numpy, torch
print(numpy.load('x.npy').sum(), numpy.load('m.npy', mmap_mode='r')[499], numpy.fromfile('raw', dtype=int).sum())
print(torch.load('w.pt')['w'].sum().item(), torch.load('v.pt', mmap=True)['w'][699].item())
""")
        expect(out.split() == ["124750", "499", "44850", "244650", "699"], out)


def many_at_once_bring_each_object_once():
    works_here()
    put("many", **{f"{number:02d}": os.urandom(5000) for number in range(30)})
    with job_folder() as job:
        laid = Laid(job, "many")
        out = laid.python("""
import concurrent.futures, os
def read(name):
    return len(open(name, 'rb').read())
pids = []
for _ in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        pids = None
        break
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    total = sum(pool.map(read, [f'{number:02d}' for number in range(30)] * 2))
if pids:
    print(total, [os.waitpid(pid, 0)[1] for pid in pids])
os._exit(total != 300000) if pids is None else None
""")
        expect(out == "300000 [0, 0]\n", out)
        expect(laid.asked() == [f"{number:02d}" for number in range(30)], laid.asked())
        expect(files_below(laid.folder) == {key[len("many/"):]: body for key, body in s3.listed("many/").items()})


def several_commands_may_run_below_one_view():
    works_here()
    put("several", a=b"a", b=b"b")
    with job_folder() as job:
        laid = Laid(job, "several")
        with fastfile.View(laid.folder.parent, laid.said) as view:
            for name in ("a", "b", "a"):
                done = subprocess.run(view.command(["cat", name]), pass_fds=view.pass_fds, cwd=laid.folder, capture_output=True,
                                      timeout=60)
                expect(done.stdout == name.encode(), done)
            # The exit code and the signals are the command's own.
            expect(subprocess.run(view.command(["sh", "-c", "kill -TERM $$"]), pass_fds=view.pass_fds, timeout=60).returncode == -15)
            expect(subprocess.run(view.command(["sh", "-c", "exit 7"]), pass_fds=view.pass_fds, timeout=60).returncode == 7)
        expect(laid.asked() == ["a", "b"], laid.asked())


def what_came_before_is_there_at_the_next_start():
    works_here()
    put("next", a=b"aaa", b=b"bbb")
    with job_folder() as job:
        laid = Laid(job, "next")
        expect(laid.run("cat", "a", cwd=laid.folder) == "aaa")
        laid = Laid(job, "next")
        expect((laid.folder / "a").read_bytes() == b"aaa" and laid.run("cat", "a", "b", cwd=laid.folder) == "aaabbb")
        expect(laid.asked() == ["b"], laid.asked())


def an_object_that_changed_is_an_error_of_its_open():
    works_here()
    put("altered", good=b"good", bad=b"bad")
    with job_folder() as job:
        laid = Laid(job, "altered")
        s3.put("altered/bad", b"worse")
        out = laid.python("""
try:
    open('bad')
except OSError as error:
    print(error.errno, open('good').read())
""")
        expect(out == "5 good\n", out)
        text = "bad cannot be opened: s3://data/altered/bad has changed since it was listed"
        expect(any(text in line for line in laid.said), laid.said)
        expect((laid.folder / "bad").stat().st_size == 3)


def a_question_that_cannot_be_read_is_an_error_of_the_open():
    """Never "go on": a program of root's would read a placeholder."""
    works_here()
    put("unread", a=b"a", b=b"b")
    original = fastfile._text_read

    def text_read(pid, address):
        text = original(pid, address)
        if text == b"a":
            raise OSError(24, "Too many open files")
        return text

    with job_folder() as job:
        laid = Laid(job, "unread")
        fastfile._text_read = text_read
        try:
            out = laid.python("""
try:
    open('a')
except OSError as error:
    print(error.errno, open('b').read())
""")
        finally:
            fastfile._text_read = original
        expect(out == "24 b\n", out)


def a_file_that_is_not_ours_costs_nothing_but_the_question():
    works_here()
    put("other", a=b"a")
    with job_folder() as job:
        laid = Laid(job, "other")
        out = laid.python("""
import errno, os
def number(path, flags=os.O_RDONLY):
    try:
        return os.close(os.open(path, flags)) or 0
    except OSError as error:
        return error.errno
print(number('/etc/passwd') == 0, number('none') == errno.ENOENT, number('') == errno.ENOENT, number('a/b') == errno.ENOTDIR)
print(number('x' * 5000) == errno.ENAMETOOLONG, number('.', os.O_RDONLY | os.O_DIRECTORY) == 0)
""")
        expect(out.split() == ["True"] * 6, out)
        expect(laid.asked() == [], laid.asked())


def no_right_is_needed():
    """By a process that has no capability, and so none of root's."""
    works_here()
    put("rights", a=b"right", b=b"left")
    with job_folder() as job:
        lead = """
import ctypes, os, sys
for right in range(64):
    ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP: gone with the next exec
os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])
"""
        body = f"""
import re, subprocess, sys
sys.path[:0] = {sys.path[:2]!r}
from pathlib import Path
from shoal.job import channels, fastfile
from shoal.job.document import Channel
print(re.search('CapEff:.*', open('/proc/self/status').read()).group().split()[1])
folder = Path({str(channel_folder(job))!r})
channels.channel_bring(Channel('s3://data/rights/', input_mode='FastFile'), folder, 0, 1, print)
try:
    open(folder / 'a')
except PermissionError:
    print('a stranger may not')
with fastfile.View(folder.parent, print) as view:
    print(subprocess.run(view.command(['cat', str(folder / 'a')]), pass_fds=view.pass_fds, stdout=subprocess.PIPE, timeout=60).stdout)
"""
        done = subprocess.run([sys.executable, "-c", lead, body], capture_output=True, text=True, timeout=120)
        lines = done.stdout.splitlines()
        expect(len(lines) == 5 and int(lines[0], 16) == 0 and lines[2:4] == ["a stranger may not", "b'right'"],
               done.stdout, done.stderr)
        expect("1 of 2 objects" in lines[4], lines)


def where_the_kernel_asks_nobody_all_comes_before():
    put("before", a=b"a", b=b"b")
    original, fastfile.why_not = fastfile.why_not, lambda: "the kernel takes no filter: Function not implemented"
    try:
        with job_folder() as job:
            laid = Laid(job, "before")
            expect(laid.asked() == ["a", "b"] and files_below(laid.folder) == {"a": b"a", "b": b"b"})
            expect("FastFile is not possible here (the kernel takes no filter" in laid.said[0], laid.said)
            expect(fastfile.View(laid.folder.parent, laid.said).command(["cat"]) == ["cat"])
    finally:
        fastfile.why_not = original


def local_data_are_linked_and_need_no_view():
    with job_folder() as job, tempfile.TemporaryDirectory() as source:
        (pathlib.Path(source) / "x").write_bytes(b"1")
        channels.channel_bring(Channel(source, input_mode="FastFile"), channel_folder(job), 0, 1, Said())
        with fastfile.View(channel_folder(job).parent, Said()) as view:
            expect(view.command(["cat", "x"]) == ["cat", "x"] and view.pass_fds == ())
        expect(files_below(channel_folder(job)) == {"x": b"1"})


run_cases([
    names_and_sizes_are_there_and_bytes_come_when_asked,
    it_does_not_matter_how_a_file_is_opened,
    arrays_and_tensors_read_it,
    many_at_once_bring_each_object_once,
    several_commands_may_run_below_one_view,
    what_came_before_is_there_at_the_next_start,
    an_object_that_changed_is_an_error_of_its_open,
    a_question_that_cannot_be_read_is_an_error_of_the_open,
    a_file_that_is_not_ours_costs_nothing_but_the_question,
    no_right_is_needed,
    where_the_kernel_asks_nobody_all_comes_before,
    local_data_are_linked_and_need_no_view,
])
