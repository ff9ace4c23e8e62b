/* `shoal job`: runs the Python package, which does the work. It is searched next to this command (in a checkout, in a wheel),
 * then on this Python's own search path. The help is here, so that it can be read without Python. */
#include "tool.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "Usage: shoal job COMMAND [arguments...]\n"
    "\n"
    "Runs training jobs. One document (JSON, TOML or Python) describes a job: what to train, where, with\n"
    "which `distribution`, on which data. docs/jobs.md explains its fields. Everything that a job writes is\n"
    "in one folder, JOBS/NAME. JOBS is $SHOAL_JOBS, or ~/.local/share/shoal/jobs if that is not set.\n"
    "\n"
    "Commands:\n"
    "    check FILE       list all mistakes of a document, without starting the job\n"
    "    run FILE         start the job, show the output of its workers, and wait until it ends\n"
    "    list             list all jobs, the newest first\n"
    "    status NAME      show the state of a job\n"
    "    logs NAME        print what the workers of a job wrote\n"
    "    stop NAME        ask a job to end; its script gets SIGTERM, and time for a last checkpoint\n"
    "    report NAME      write one HTML page about a job\n"
    "    watch NAME       show a live page about a job\n"
    "    serve NAME       serve a job's model: /ping and /invocations\n"
    "\n"
    "    --help           (after a command) explain the command and its options\n"
    "    --name NAME      (run) name of the job; default: the document's, else the entry point and the time\n"
    "    --detach         (run) print the job's name and return at once\n"
    "    --set KEY=VALUE  (check, run) replace a field of the document, such as hyperparameters.lr=0.2\n"
    "    --follow         (logs) print new lines until the job ends\n"
    "    --format json    (check, run, list, status) output for programs\n"
    "\n"
    "Examples:\n"
    "    cat > job.toml <<END\n"
    "    entry_point = \"train.py\"\n"
    "    instance_count = 2\n"
    "    distribution = {smdistributed = {dataparallel = {enabled = true}}}\n"
    "    hyperparameters = {epochs = 3, lr = 0.1}\n"
    "    channels = {training = \"data/fashion\"}\n"
    "    END\n"
    "    shoal job check job.toml                    all mistakes at once\n"
    "    shoal job run job.toml --name first         two hosts, emulated on this machine\n"
    "    shoal job run job.toml --detach             print the name and return; the job continues\n"
    "    shoal job run job.toml --set instance_count=1 --set hyperparameters.lr=0.2\n"
    "    shoal job logs first --follow               until the job ends\n"
    "    shoal job status first --format json        for programs\n"
    "    shoal job stop first --wait\n"
    "\n"
    "Environment:\n"
    "    SHOAL_JOBS       the folder of all jobs\n"
    "    SHOAL_PYTHON     the Python that runs jobs and their scripts (default: python3 on PATH)\n"
    "\n"
    "Exit codes:\n"
    "    0     the job has completed, or the command succeeded\n"
    "    1     the job failed\n"
    "    2     invalid document or arguments, or there is no such job\n"
    "    3     the job was stopped\n"
    "    127   there is no Python, or it has no package shoal\n";

enum { EXIT_NO_PYTHON = 127 };

/* The folders that may hold the package, starting from this command's folder: a checkout's build folder, and a wheel. An empty
 * entry of sys.path would let a folder "shoal" in the working directory replace it. */
static const char program[] =
    "import os, sys\n"
    "sys.path = [path for path in sys.path if path]\n"
    "beside = os.path.dirname(os.environ['SHOAL_COMMAND'])\n"
    "for folder in (os.path.join(beside, '..', 'python'), os.path.join(beside, '..', '..')):\n"
    "    if os.path.isfile(os.path.join(folder, 'shoal', 'job', 'command.py')):\n"
    "        sys.path.insert(0, os.path.realpath(folder))\n"
    "        break\n"
    "if sys.version_info < (3, 9):\n"
    "    print('shoal job: needs Python 3.9 or newer, and', sys.executable, 'is', sys.version.split()[0], file=sys.stderr)\n"
    "    sys.exit(127)\n"
    "import importlib.util\n"
    "if not importlib.util.find_spec('shoal') or not importlib.util.find_spec('shoal.job'):\n"
    "    print('shoal job: the Python package shoal is neither beside', os.environ['SHOAL_COMMAND'], 'nor where',\n"
    "          sys.executable, 'looks: install it for this Python, or name its folder in PYTHONPATH', file=sys.stderr)\n"
    "    sys.exit(127)\n"
    "from shoal.job.command import main\n"
    "sys.exit(main(sys.argv[1:]))\n";

static bool is_help(const char *word)
{
    return !strcmp(word, "--help") || !strcmp(word, "-h");
}

static int python_start(int argc, char **argv)
{
    char code_option[] = "-c", code[sizeof program], self[PATH_MAX], fallback[] = "python3";
    char *python = getenv("SHOAL_PYTHON");
    char **words = calloc((size_t)argc + 3, sizeof *words);
    if (!words || !realpath("/proc/self/exe", self) || setenv("SHOAL_COMMAND", self, 1)) {
        fprintf(stderr, "shoal job: cannot begin: %s\n", strerror(errno));
        free(words);
        return 1;
    }
    memcpy(code, program, sizeof program);
    python = python && *python ? python : fallback;
    words[0] = python;
    words[1] = code_option;
    words[2] = code;
    memcpy(words + 3, argv + 1, (size_t)(argc - 1) * sizeof *words);
    execvp(python, words);
    fprintf(stderr, "shoal job: cannot start %s: %s; training jobs need Python 3.9 or newer (SHOAL_PYTHON names another one)\n",
            python, strerror(errno));
    free(words);
    return EXIT_NO_PYTHON;
}

int shoal_tool_job(int argc, char **argv)
{
    if (argc == 2 && is_help(argv[1])) {
        fputs(help, stdout);
        return tool_output_finish("job", 0);
    }
    if (argc < 2)
        return tool_usage_fail("job", "no command given, as in: shoal job run job.toml");
    return python_start(argc, argv);
}
