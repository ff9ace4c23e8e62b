#include "run_place.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/node_list.h"

/* The default ports of torchrun and of SageMaker's start script. */
enum { PORT_TORCHRUN = 29500, PORT_SAGEMAKER = 7777, PORT_MAX = 65535 };
/* The tasks of a Slurm step do not get a free port, so steps are spread over several. Shoal's store listens at one of the 16
 * ports after it. */
enum { PORT_STEP_FIRST = 20000, PORT_STEP_SPACE = 17, PORT_STEP_RANGES = 700 };
enum { WORKERS_MAX = 1024 };

struct place_reading {
    run_variable_fn *variable;
    void *arg;
    char *error;
};

/* The values of one source. */
struct place_said {
    const char *by;    /* the variable with the number of hosts; NULL: this source is absent */
    const char *where; /* the variable with this host's index */
    bool is_by_mpirun;
    struct run_place place; /* port 0, meet "": not given */
};

static bool place_fail(struct place_reading *reading, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool place_fail(struct place_reading *reading, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(reading->error, RUN_PLACE_ERROR_MAX, format, args);
    va_end(args);
    return false;
}

/* Returns the value of a variable, or NULL if it is not set or empty. */
static const char *place_value(struct place_reading *reading, const char *name)
{
    const char *value = reading->variable(reading->arg, name);
    return value && *value ? value : NULL;
}

static bool number_parse(const char *text, long least, long most, int *number_out)
{
    const bool is_number = *text && strspn(text, "0123456789") == strlen(text) && strlen(text) <= 9;
    const long number = is_number ? strtol(text, NULL, 10) : -1;
    if (number < least || number > most)
        return false;
    *number_out = (int)number;
    return true;
}

/* Reads a variable that must be set. `beside` is the variable that makes it necessary. */
static bool number_need(struct place_reading *reading, const char *name, const char *beside, long least, long most,
                        int *number_out)
{
    const char *text = place_value(reading, name);
    if (!text)
        return place_fail(reading, "%s is set, but %s is not; set both, or say --hosts N --host-index I --meet HOST:PORT",
                          beside, name);
    if (number_parse(text, least, most, number_out))
        return true;
    return place_fail(reading, "%s is '%.60s', but must be a whole number from %ld to %ld", name, text, least, most);
}

static bool number_take(struct place_reading *reading, const char *name, long least, long most, int *number_out)
{
    return !place_value(reading, name) || number_need(reading, name, name, least, most, number_out);
}

static bool index_need(struct place_reading *reading, struct place_said *said)
{
    if (!number_need(reading, said->where, said->by, 0, RUN_HOSTS_MAX - 1, &said->place.index))
        return false;
    if (said->place.index < said->place.hosts)
        return true;
    return place_fail(reading, "%s is %d, but with %s %d it may be 0 to %d", said->where, said->place.index, said->by,
                      said->place.hosts, said->place.hosts - 1);
}

static bool meet_take(struct place_reading *reading, const char *address, const char *port, int usual_port,
                      struct run_place *place)
{
    const char *host = place_value(reading, address);
    if (!host)
        return true;
    if (strlen(host) >= sizeof place->meet)
        return place_fail(reading, "%s is longer than %d characters", address, RUN_MEET_MAX - 1);
    snprintf(place->meet, sizeof place->meet, "%s", host);
    place->port = usual_port;
    return number_take(reading, port, 1, PORT_MAX, &place->port);
}

/* ---- engines: the programs that start this process ---- */

/* mpirun starts ranks; one `shoal run` for each host is one rank on each. */
static bool mpi_read(struct place_reading *reading, const char *size, const char *rank, const char *local_size,
                     struct place_said *said)
{
    int local = 1;
    said->by = size;
    said->where = rank;
    if (!number_need(reading, size, rank, 1, RUN_HOSTS_MAX, &said->place.hosts) || !index_need(reading, said) ||
        !number_take(reading, local_size, 1, RUN_HOSTS_MAX, &local))
        return false;
    if (local == 1)
        return true;
    return place_fail(reading,
                      "%s is %d: mpirun has started this number of `shoal run` on this host; start one for each host "
                      "(mpirun -n HOSTS --map-by ppr:1:node, or MPICH's -ppn 1), or say --hosts 1 if each is a job of its own",
                      local_size, local);
}

static bool slurm_meet(struct place_reading *reading, struct run_place *place)
{
    int job = 0, step = 0;
    const char *nodes = place_value(reading, "SLURM_STEP_NODELIST");
    if (!nodes || !shoal_node_list_first(nodes, place->meet, sizeof place->meet))
        return place_fail(reading, "SLURM_STEP_NODELIST is '%.60s', which does not begin with a host; say --meet HOST:PORT",
                          nodes ? nodes : "");
    if (!number_take(reading, "SLURM_JOB_ID", 0, 999999999, &job) ||
        !number_take(reading, "SLURM_STEP_ID", 0, 999999999, &step))
        return false;
    place->port = PORT_STEP_FIRST + PORT_STEP_SPACE * (int)(((unsigned)job * 31 + (unsigned)step) % PORT_STEP_RANGES);
    return true;
}

/* A batch script and the processes that it starts without srun belong to no step: they have no SLURM_STEP_NUM_TASKS. */
static bool slurm_read(struct place_reading *reading, struct place_said *said)
{
    int tasks = 0;
    said->by = "SLURM_STEP_NUM_NODES";
    said->where = "SLURM_NODEID";
    if (!number_need(reading, said->by, "SLURM_STEP_NUM_TASKS", 1, RUN_HOSTS_MAX, &said->place.hosts) ||
        !index_need(reading, said) || !number_need(reading, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", 1, 999999999, &tasks))
        return false;
    if (tasks != said->place.hosts)
        return place_fail(
            reading,
            "SLURM_STEP_NUM_TASKS is %d on %d hosts; start one `shoal run` for each host (srun --ntasks-per-node=1), "
            "or say --hosts 1 if each is a job of its own",
            tasks, said->place.hosts);
    return said->place.hosts == 1 || slurm_meet(reading, &said->place);
}

static bool engine_read(struct place_reading *reading, struct place_said *said)
{
    if (place_value(reading, "OMPI_COMM_WORLD_RANK")) {
        said->is_by_mpirun = true;
        return mpi_read(reading, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", said);
    }
    if (place_value(reading, "PMI_RANK") && place_value(reading, "MPI_LOCALNRANKS")) {
        said->is_by_mpirun = true;
        return mpi_read(reading, "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", said);
    }
    const bool is_task = place_value(reading, "SLURM_PROCID") && place_value(reading, "SLURM_STEP_NUM_TASKS");
    return !is_task || slurm_read(reading, said);
}

/* ---- platforms: the services that assign hosts to this job ---- */

static bool pet_read(struct place_reading *reading, struct place_said *said)
{
    const char *hosts = place_value(reading, "PET_NNODES"), *workers = place_value(reading, "PET_NPROC_PER_NODE");
    if (!hosts)
        return true;
    said->by = "PET_NNODES";
    said->where = "PET_NODE_RANK";
    if (strchr(hosts, ':'))
        return place_fail(
            reading, "PET_NNODES is '%.60s', but must be one number: shoal run starts with all its hosts or not at all", hosts);
    if (!number_need(reading, said->by, said->by, 1, RUN_HOSTS_MAX, &said->place.hosts))
        return false;
    if (said->place.hosts > 1 && !index_need(reading, said))
        return false;
    /* Words such as auto and gpu leave the number to the host. */
    if (workers && strspn(workers, "0123456789") == strlen(workers) &&
        !number_take(reading, "PET_NPROC_PER_NODE", 1, WORKERS_MAX, &said->place.workers))
        return false;
    return meet_take(reading, "PET_MASTER_ADDR", "PET_MASTER_PORT", PORT_TORCHRUN, &said->place);
}

/* Finds the next name of a list such as ["algo-1","algo-2"]. Returns false at its end, or if the text is not such a list. */
static bool host_next(const char **at, const char **name, size_t *bytes)
{
    *at += strspn(*at, "[, \t");
    if (**at != '"')
        return false;
    *name = *at + 1;
    *bytes = strcspn(*name, "\"");
    *at = *name + *bytes;
    if (**at != '"')
        return false;
    *at += 1;
    return *bytes > 0;
}

static bool sagemaker_read(struct place_reading *reading, struct place_said *said)
{
    const char *list = place_value(reading, "SM_HOSTS"), *own = place_value(reading, "SM_CURRENT_HOST");
    const char *at = list, *name = NULL;
    size_t bytes = 0;
    if (!list)
        return true;
    said->by = "SM_HOSTS";
    said->where = "SM_CURRENT_HOST";
    said->place.index = -1;
    for (; host_next(&at, &name, &bytes); said->place.hosts++) {
        if (own && strlen(own) == bytes && memcmp(own, name, bytes) == 0)
            said->place.index = said->place.hosts;
        if (!said->place.hosts)
            snprintf(said->place.meet, sizeof said->place.meet, "%.*s", (int)(bytes < RUN_MEET_MAX ? bytes : RUN_MEET_MAX - 1),
                     name);
    }
    at += strspn(at, " \t");
    if (!said->place.hosts || said->place.hosts > RUN_HOSTS_MAX || strcmp(at, "]") != 0)
        return place_fail(reading,
                          "SM_HOSTS is '%.60s', but must be a list of at most %d hosts such as [\"algo-1\",\"algo-2\"]", list,
                          RUN_HOSTS_MAX);
    if (said->place.index < 0)
        return place_fail(reading, "SM_CURRENT_HOST is '%.60s', which is none of SM_HOSTS (%.200s)", own ? own : "", list);
    said->place.port = PORT_SAGEMAKER;
    return number_take(reading, "SM_MASTER_PORT", 1, PORT_MAX, &said->place.port) &&
           meet_take(reading, "SM_MASTER_ADDR", "SM_MASTER_PORT", PORT_SAGEMAKER, &said->place);
}

static bool dstack_read(struct place_reading *reading, struct place_said *said)
{
    int gpus = 0;
    if (!place_value(reading, "DSTACK_NODES_NUM"))
        return true;
    said->by = "DSTACK_NODES_NUM";
    said->where = "DSTACK_NODE_RANK";
    if (!number_need(reading, said->by, said->by, 1, RUN_HOSTS_MAX, &said->place.hosts) || !index_need(reading, said) ||
        !number_take(reading, "DSTACK_GPUS_PER_NODE", 0, WORKERS_MAX, &gpus))
        return false;
    said->place.workers = gpus;
    return meet_take(reading, "DSTACK_MASTER_NODE_IP", "MASTER_PORT", PORT_TORCHRUN, &said->place);
}

/* ---- all together ---- */

/* Under mpirun the index of SageMaker is not compared: ranks on other hosts see the SM_CURRENT_HOST of the first. */
static bool said_agree(struct place_reading *reading, const struct place_said *a, const struct place_said *b)
{
    if (a->place.hosts != b->place.hosts)
        return place_fail(reading, "%s counts %d host%s, but %s counts %d; say which with --hosts", a->by, a->place.hosts,
                          a->place.hosts == 1 ? "" : "s", b->by, b->place.hosts);
    if (a->place.index != b->place.index && !(a->is_by_mpirun && strcmp(b->by, "SM_HOSTS") == 0))
        return place_fail(reading, "%s makes this host %d, %s makes it %d; say which with --host-index", a->where,
                          a->place.index, b->where, b->place.index);
    return true;
}

/* The first source applies; the others add values that it lacks. */
static bool said_join(struct place_reading *reading, struct place_said *all, const struct place_said *other)
{
    if (!other->by)
        return true;
    if (!all->by) {
        *all = *other;
        return true;
    }
    if (!said_agree(reading, all, other))
        return false;
    if (!all->place.workers)
        all->place.workers = other->place.workers;
    if (*other->place.meet && !*all->place.meet) {
        memcpy(all->place.meet, other->place.meet, sizeof all->place.meet);
        all->place.port = other->place.port;
    }
    return true;
}

static bool environment_read(struct place_reading *reading, struct place_said *all)
{
    static bool (*const readers[])(struct place_reading *, struct place_said *) = {engine_read, pet_read, sagemaker_read,
                                                                                   dstack_read};
    for (size_t i = 0; i < sizeof readers / sizeof readers[0]; i++) {
        struct place_said said = {0};
        if (!readers[i](reading, &said) || !said_join(reading, all, &said))
            return false;
    }
    return true;
}

/* Parses "host:29500" or "[fd77::1]:29500". */
static bool meet_parse(struct place_reading *reading, const char *text, struct run_place *place)
{
    const char *colon = strrchr(text, ':'), *host = text;
    size_t bytes = colon ? (size_t)(colon - text) : 0;
    const bool is_quoted = bytes > 2 && text[0] == '[' && text[bytes - 1] == ']';
    const bool is_bare = bytes && memchr(text, ':', bytes) == NULL && !strchr(text, '[');
    if ((!is_quoted && !is_bare) || bytes >= sizeof place->meet || !number_parse(colon + 1, 1, PORT_MAX, &place->port))
        return place_fail(reading, "--meet takes HOST:PORT, such as node1:29500 or [fd77::1]:29500, not '%.60s'", text);
    host += is_quoted;
    bytes -= is_quoted ? 2 : 0;
    memcpy(place->meet, host, bytes);
    place->meet[bytes] = 0;
    return true;
}

static bool meet_find(struct place_reading *reading, const struct run_place_options *options, struct run_place *place)
{
    if (options->meet)
        return meet_parse(reading, options->meet, place);
    if (place_value(reading, "MASTER_ADDR"))
        return meet_take(reading, "MASTER_ADDR", "MASTER_PORT", place->port ? place->port : PORT_TORCHRUN, place);
    return *place->meet ||
           place_fail(reading,
                      "nothing says where %d hosts meet; say --meet HOST:PORT, with host 0 and a port that is free "
                      "there, or set MASTER_ADDR and MASTER_PORT on all hosts",
                      place->hosts);
}

/* Options override the environment. With --hosts and --host-index the environment is not read at all. */
static bool hosts_find(struct place_reading *reading, const struct run_place_options *options, struct run_place *place)
{
    struct place_said said = {0};
    if (options->hosts && (options->index >= 0 || options->hosts == 1)) {
        place->hosts = options->hosts;
        place->index = options->index < 0 ? 0 : options->index;
        return true;
    }
    if (!environment_read(reading, &said))
        return false;
    *place = said.place;
    if (!said.by && options->hosts)
        return place_fail(reading, "--hosts is %d, and nothing says which of them this is; say --host-index, 0 to %d",
                          options->hosts, options->hosts - 1);
    if (!said.by && (options->index >= 0 || options->meet))
        return place_fail(reading, "%s is for several hosts, and nothing says how many there are; say --hosts N",
                          options->index >= 0 ? "--host-index" : "--meet");
    if (said.by && options->hosts && options->hosts != said.place.hosts)
        return place_fail(reading, "--hosts is %d, but %s counts %d; say --host-index as well, or leave --hosts out",
                          options->hosts, said.by, said.place.hosts);
    if (options->index >= 0)
        place->index = options->index;
    place->hosts = said.by ? place->hosts : 1;
    return true;
}

bool run_place_find(const struct run_place_options *options, run_variable_fn *variable, void *arg, struct run_place *place_out,
                    char error[RUN_PLACE_ERROR_MAX])
{
    struct place_reading reading = {.variable = variable, .arg = arg, .error = error};
    struct run_place place = {0};
    if (!hosts_find(&reading, options, &place))
        return false;
    if (place.index >= place.hosts)
        return place_fail(&reading, "--host-index is %d, but with %d host%s it may be 0 to %d", place.index, place.hosts,
                          place.hosts == 1 ? "" : "s", place.hosts - 1);
    if (options->workers)
        place.workers = options->workers;
    if (place.hosts > 1) {
        if (!place.workers)
            return place_fail(&reading, "nothing says how many workers each of the %d hosts starts; say -n N", place.hosts);
        if (place.workers > SHOAL_RANKS_MAX - (place.hosts - 1))
            return place_fail(&reading, "%d hosts, this one with %d workers, are more than %d ranks; say a smaller -n",
                              place.hosts, place.workers, SHOAL_RANKS_MAX);
        if (!meet_find(&reading, options, &place))
            return false;
    } else {
        place.meet[0] = 0;
        place.port = 0;
    }
    *place_out = place;
    return true;
}
