/* The command `shoal`: finds the subcommand and runs it. */
#include "fold.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "tool.h"

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
};

static const struct command commands[] = {
    {"run", shoal_tool_run, "start N copies of a program on this host, as the workers of one job"},
    {"job", shoal_tool_job, "run a training job from one document: here, on many hosts, on Slurm or on Kubernetes"},
    {"bench", shoal_tool_bench, "measure collectives on this machine"},
    {"explain", shoal_tool_explain, "show which algorithm a call would use, why, and its plan"},
    {"sim", shoal_tool_sim, "predict how long a collective takes on many hosts"},
    {"advise", shoal_tool_advise, "how to scale a training: memory, time and cost on each number of machines"},
    {"trace", shoal_tool_trace, "merge the flight recorders of all ranks: a timeline, and which ranks were late"},
    {"top", shoal_tool_top, "show what each rank of a running job does, and which rank it waits for"},
    {"doctor", shoal_tool_doctor, "find what would make a job fail or run slowly, here or on many hosts"},
    {"info", shoal_tool_info, "show this machine, the settings, the algorithms"},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

/* Further commands of some subcommands, with their own help. */
static const char *const parts[][2] = {
    {"bench step", "replay training steps: how much of the averaging the backward pass hides"},
    {"bench scaling", "measure steps on 1, 2, 4, ... workers, next to the prediction"},
    {"bench pipeline", "replay the steps of a pipeline: how much longer they take than the schedule needs"},
    {"bench optimizer", "measure how fast one core steps parameters, compared with memory"},
    {"explain pipeline", "cut a model into stages, and predict its step and memory"},
    {"sim step", "predict the time and the efficiency of training steps on many hosts"},
    {"sim pipeline", "make, check, time and draw schedules of a pipeline"},
};

static void help_print(FILE *out)
{
    fputs("shoal: collective communication for data-parallel training.\n\nUsage:\n", out);
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(out, "    shoal %-16s  %s\n", commands[i].name, commands[i].summary);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        fprintf(out, "    shoal %-16s  %s\n", parts[i][0], parts[i][1]);
    fputs("    shoal --version         print the version\n"
          "    shoal COMMAND --help    print what a command does, its options and examples\n"
          "\n"
          "To begin:\n"
          "    shoal run -n 2 ./train                          two workers on this machine\n"
          "    shoal job run job.toml                          a training job from one document, with logs and model\n"
          "    shoal bench allreduce -n 2 --min 8 --max 256M   how fast an all-reduce is here\n"
          "    shoal explain allreduce --ranks 4 --bytes 3MiB  what it would do, and why\n"
          "    shoal sim allreduce --hosts 1-64 --bytes 100M   how long it would take on many hosts\n"
          "    shoal advise --help                             what to change when a model does not fit or is too slow\n"
          "    shoal trace flight.*                            which ranks were late, from the recorders of all ranks\n"
          "    shoal top                                       what the jobs here do now, and which rank waits for which\n"
          "    shoal doctor --ranks 8                          what would go wrong here with eight workers\n"
          "    shoal info --settings                           every SHOAL_* variable, its value and meaning\n"
          "\n"
          "Exit codes: 0 success, 1 failure, 2 invalid arguments; 'shoal run' passes on its workers' codes.\n",
          out);
}

static const struct command *command_find(const char *name)
{
    for (size_t i = 0; i < COMMANDS; i++)
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    return NULL;
}

static int command_unknown(const char *name)
{
    const char *words[COMMANDS + 3] = {"--help", "--version"};
    for (size_t i = 0; i < COMMANDS; i++)
        words[i + 2] = commands[i].name;
    const char *nearest = tool_word_nearest(name, words);
    if (nearest)
        fprintf(stderr, "shoal: there is no command '%s'; did you mean 'shoal %s'? (shoal --help lists them)\n", name, nearest);
    else
        fprintf(stderr, "shoal: there is no command '%s' (shoal --help lists them)\n", name);
    return TOOL_EXIT_USAGE;
}

/* If the command is started with a standard descriptor closed, the next file opened would get its number and its output. Opens
 * the missing ones. Returns false on failure. */
static bool descriptors_fill(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_WRONLY : O_RDONLY) != fd)
            return false;
    return true;
}

/* "shoal help run" does what "shoal run --help" does, "shoal help sim step" what "shoal sim step --help" does. */
static int help_command(int argc, char **argv)
{
    char help[] = "--help";
    if (argc < 3) {
        help_print(stdout);
        return tool_output_finish("help", 0);
    }
    const struct command *command = command_find(argv[2]);
    if (!command)
        return command_unknown(argv[2]);
    char *words[] = {argv[2], argc > 3 ? argv[3] : help, help, NULL};
    return command->run(argc > 3 ? 3 : 2, words);
}

int main(int argc, char **argv)
{
    if (!descriptors_fill())
        return 1;
    if (argc < 2) {
        help_print(stderr);
        return TOOL_EXIT_USAGE;
    }
    if (strcmp(argv[1], "top") != 0 && strcmp(argv[1], "job") != 0) /* top moves the cursor, job becomes another program */
        fold_begin();
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help"))
        return help_command(argc, argv);
    if (!strcmp(argv[1], "--version")) {
        printf("shoal %s\n", shoal_version());
        return tool_output_finish("--version", 0);
    }
    const struct command *command = command_find(argv[1]);
    return command ? command->run(argc - 1, argv + 1) : command_unknown(argv[1]);
}
