/* `shoal doctor`: finds what would go wrong here, or on the hosts of a file, and how to fix it. */
#include "doctor.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum option {
    OPTION_HELP = 1,
    OPTION_JSON,
    OPTION_RANKS,
    OPTION_TOWARDS,
    OPTION_HOSTS,
    OPTION_VIA,
    OPTION_SHOAL,
    OPTION_TIMEOUT
};

static const struct tool_option options[] = {
    {"--json", OPTION_JSON, NULL},
    {"--ranks", OPTION_RANKS, "N"},
    {"--towards", OPTION_TOWARDS, "HOST"},
    {"--hosts", OPTION_HOSTS, "FILE"},
    {"--via", OPTION_VIA, "COMMAND"},
    {"--shoal", OPTION_SHOAL, "PATH"},
    {"--timeout", OPTION_TIMEOUT, "SECONDS"},
    {"--help", OPTION_HELP, NULL},
    {"-h", OPTION_HELP, NULL},
    {NULL, 0, NULL},
};

static const char help[] =
    "Usage:\n"
    "    shoal doctor [--ranks N] [--towards HOST] [--json]\n"
    "    shoal doctor --hosts FILE [--via COMMAND] [--shoal PATH] [--timeout SECONDS] [--json]\n"
    "    shoal doctor --data URI [--need RATE | --profile FILE --samples N] [--streams LIST] [--json]\n"
    "\n"
    "Reports what would go wrong on this host, or on the hosts of a file, and what to do about it. It checks wrong and\n"
    "mistyped settings, the launcher's variables, cores, memory, limits, the kernel, names, interfaces, ports, libfabric's\n"
    "providers and the secret. It changes nothing, and waits no more than a few seconds for anything. A finding is ok, a note\n"
    "(worth knowing), a warning (slow or fragile) or an error (a job would fail).\n"
    "\n"
    "    --ranks N          how many ranks this host will run; default: as the launcher's variables say\n"
    "    --towards HOST     a host that must be reachable from here, in addition to MASTER_ADDR\n"
    "    --json             one object per line: level, subject, found, advice; with --hosts also the hosts\n"
    "    --hosts FILE       check each host of the file, all at once. A line is \"host\" or \"host slots=N\"; # begins a\n"
    "                       comment\n"
    "    --via COMMAND      command that runs another one on a host, called as COMMAND HOST 'shoal doctor ...', like ssh;\n"
    "                       default: \"ssh -o BatchMode=yes\"\n"
    "    --shoal PATH       the shoal command on the hosts; default: as called here\n"
    "    --timeout SECONDS  longest time for each host, default 20; without --hosts, for each name server, default 3\n"
    "\n"
    "With --hosts, a finding that is the same on all hosts that answered is printed once; other lines begin with their hosts.\n"
    "Each host also checks that it resolves the name of the first one and finds a route to it. Different versions and\n"
    "MTUs are reported. Each host checks the environment of a command that is started there, not the environment here.\n"
    "\n"
    "With --data the command measures something else: how fast this host reads from storage, and whether a job would wait\n"
    "for its data. It reads with the code of shoal job, which needs Python 3.9 (SHOAL_PYTHON names one), and keeps nothing:\n"
    "    --data URI         a folder or file, s3://BUCKET/PREFIX, or http(s)://HOST/PATH\n"
    "    --need RATE        what a host of the job needs, such as 300MB/s or 2.5gbit\n"
    "    --profile FILE     compute the need: from passes that shoal.torch.profile measured,\n"
    "    --batch N              the samples of a worker in a step (those of the profile),\n"
    "    --samples N            the samples in all of the data, or --sample-bytes SIZE, the bytes of one,\n"
    "    --workers N            and the workers of a host (1)\n"
    "    --streams LIST     how many reads at once; each number is measured by itself (1,4,16)\n"
    "    --seconds S        the time to read, for all numbers of streams together (9)\n"
    "    --json             one object\n"
    "Rates are bytes per second: MB is 10^6 bytes, MiB 2^20. Files of this machine are dropped from the page cache before\n"
    "they are read, as far as the kernel allows. On EC2 the region of the bucket is compared with that of the host.\n"
    "\n"
    "The size of /dev/shm does not matter, because memory is shared through memfd. ptrace and Yama do not matter either.\n"
    "\n"
    "Examples:\n"
    "    shoal doctor\n"
    "    shoal doctor --ranks 8                                   can this host run eight ranks?\n"
    "    MASTER_ADDR=n1 MASTER_PORT=29500 shoal doctor            before a job over several hosts\n"
    "    shoal doctor --hosts hosts.txt                           all hosts, through ssh\n"
    "    shoal doctor --hosts hosts.txt --via \"ssh -p 2222\" --shoal /opt/shoal/bin/shoal\n"
    "    shoal doctor --data s3://bucket/train --need 300MB/s     would ranks wait for data?\n"
    "    shoal doctor --data /data/imagenet --profile resnet.json --batch 64 --samples 1281167 --workers 8\n"
    "    shoal doctor --json | grep '\"level\":\"error\"'\n"
    "\n"
    "Exit codes: 0 no error was found, 1 one was found (or the output could not be written), 2 invalid arguments. With\n"
    "--data: 1 the job would be input-bound, or the data cannot be read; 127 no Python.\n";

/* ---- Options ------------------------------------------------------------------------------------------------------------- */

static bool option_read(const struct tool_args *args, int id, struct doctor_options *doctor)
{
    switch (id) {
    case OPTION_JSON:
        doctor->json = true;
        return true;
    case OPTION_RANKS:
        return tool_number_read(args, 1, SHOAL_RANKS_MAX, &doctor->ranks);
    case OPTION_TIMEOUT:
        if (!tool_seconds_read(args, &doctor->timeout_ms))
            return false;
        return (doctor->timeout_ms && doctor->timeout_ms <= 86400000) || tool_value_fail(args, "seconds, more than 0");
    case OPTION_TOWARDS:
        doctor->towards = args->value;
        return true;
    case OPTION_HOSTS:
        doctor->file = args->value;
        return true;
    case OPTION_VIA:
        doctor->via = args->value;
        return true;
    default:
        doctor->shoal = args->value;
        return true;
    }
}

/* Checks for options that belong to the other use. Returns the exit code. */
static int options_check(const struct doctor_options *doctor)
{
    if (!doctor->file && (doctor->via || doctor->shoal))
        return tool_usage_fail("doctor", "%s is for other hosts: also set --hosts FILE", doctor->via ? "--via" : "--shoal");
    if (doctor->file && (doctor->towards || doctor->ranks))
        return tool_usage_fail("doctor", "%s and --hosts cannot be combined: %s", doctor->towards ? "--towards" : "--ranks",
                               doctor->towards ? "each host is asked about the first one" : "the file says slots=N");
    return 0;
}

/* ---- One host ------------------------------------------------------------------------------------------------------------ */

static void take(void *arg, enum shoal_finding_level level, const char *subject, const char *found, const char *advice)
{
    const struct doctor_finding finding = {.level = level, .subject = subject, .found = found, .advice = advice};
    doctor_findings_add(arg, &finding, 0);
}

static int diagnose_here(const struct doctor_options *doctor, struct doctor_findings *findings)
{
    struct shoal_diagnosis_options diagnosis = SHOAL_DIAGNOSIS_OPTIONS_INIT;
    diagnosis.towards = doctor->towards;
    diagnosis.ranks = doctor->ranks;
    diagnosis.timeout_ms = (uint32_t)doctor->timeout_ms;
    return shoal_diagnose(&diagnosis, take, findings) == SHOAL_OK ? 0 : 1;
}

/* ---- Many ---------------------------------------------------------------------------------------------------------------- */

static int diagnose_hosts(struct doctor_options *doctor, struct ask_hosts *hosts, struct doctor_findings *findings)
{
    char path[ASK_PATH_MAX];
    const int code = ask_hosts_read("doctor", doctor->file, hosts);
    if (code)
        return code;
    doctor->via = doctor->via ? doctor->via : ASK_VIA;
    doctor->shoal = doctor->shoal ? doctor->shoal : ask_shoal_name(path);
    doctor->timeout_ms = doctor->timeout_ms ? doctor->timeout_ms : ASK_TIMEOUT_MS;
    doctor_hosts_ask(hosts, doctor, findings);
    return doctor_findings_count(findings, SHOAL_FINDING_ERROR) ? 1 : 0;
}

static _Noreturn void doctor_run(struct doctor_options *doctor)
{
    struct doctor_findings findings = {0};
    struct ask_hosts hosts = {0};
    int code = doctor->file ? diagnose_hosts(doctor, &hosts, &findings) : diagnose_here(doctor, &findings);
    if (code != TOOL_EXIT_USAGE && doctor->json)
        doctor_findings_print_json(&findings, doctor->file ? &hosts : NULL, stdout);
    else if (code != TOOL_EXIT_USAGE)
        doctor_findings_print(&findings, doctor->file ? &hosts : NULL, stdout);
    if (findings.has_failed) {
        fputs("shoal doctor: no memory: some findings are missing\n", stderr);
        code = 1;
    }
    doctor_findings_fini(&findings);
    free(hosts.at);
    /* An abandoned probe still runs: destructors of its libraries would free memory that it uses, or wait for its locks. */
    _exit(tool_output_finish("doctor", code));
}

/* Storage is read by the Python package: returns true if an argument asks for that. */
static bool asks_for_data(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], "--data") || !strncmp(argv[i], "--data=", sizeof "--data=" - 1))
            return true;
    return false;
}

/* Runs `shoal job doctor ARGUMENTS`. */
static int data_measure(int argc, char **argv)
{
    char job[] = "job";
    char **words = calloc((size_t)argc + 2, sizeof *words);
    if (!words) {
        fputs("shoal doctor: no memory\n", stderr);
        return 1;
    }
    words[0] = job;
    memcpy(words + 1, argv, (size_t)argc * sizeof *words);
    const int code = shoal_tool_job(argc + 1, words);
    free(words);
    return code;
}

int shoal_tool_doctor(int argc, char **argv)
{
    struct tool_args args = {.command = "doctor", .argc = argc, .argv = argv, .at = 1};
    struct doctor_options doctor = {0};
    int id;
    if (asks_for_data(argc, argv))
        return data_measure(argc, argv);
    while ((id = tool_option_next(&args, options)) > 0) {
        if (id == OPTION_HELP) {
            fputs(help, stdout);
            return tool_output_finish("doctor", 0);
        }
        if (!option_read(&args, id, &doctor))
            return TOOL_EXIT_USAGE;
    }
    if (id == TOOL_OPTION_BAD)
        return TOOL_EXIT_USAGE;
    if (args.at < argc)
        return tool_usage_fail("doctor", "'%s' is not expected here", argv[args.at]);
    const int code = options_check(&doctor);
    if (code)
        return code;
    doctor_run(&doctor);
}
