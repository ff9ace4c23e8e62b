/* Joins the job that its environment describes, exchanges ranks twice, and prints one line: "rank R of N through L: 0 1 ...
 * N-1". */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "comm/settings.h"

/* Sets all[r] to the value that rank r put, less 1000 times the round. A rank puts its number plus 1000 times the round, so
 * a stale value shows. */
static enum shoal_status exchange_all(struct shoal_bootstrap *bootstrap, struct shoal_log *log, const char *name, int round,
                                      int *all)
{
    char padded[1000] = "";
    const int mine = bootstrap->rank + 1000 * round;
    char *values = calloc((size_t)bootstrap->size, sizeof padded);
    if (!values)
        return SHOAL_ERR_MEMORY;
    memcpy(padded, &mine, sizeof mine);
    const enum shoal_status status = shoal_bootstrap_gather(bootstrap, log, name, padded, values, sizeof padded, 20000);
    for (int r = 0; r < bootstrap->size; r++) {
        memcpy(&all[r], values + (size_t)r * sizeof padded, sizeof all[r]);
        all[r] -= 1000 * round;
    }
    free(values);
    return status;
}

static enum shoal_status probe(struct shoal_settings *settings, struct shoal_log *log, int round, bool is_last)
{
    struct shoal_bootstrap bootstrap;
    const bool has_time = getenv("SHOAL_BOOTSTRAP_TIMEOUT_MS") != NULL;
    SHOAL_TRY(shoal_bootstrap_from_environment(&settings->bootstrap, log,
                                               has_time ? (uint32_t)settings->comm.bootstrap_timeout_ms : 20000, &bootstrap));
    static int first[16384], second[16384];
    enum shoal_status status = exchange_all(&bootstrap, log, "probe", round, first);
    if (status == SHOAL_OK)
        status = exchange_all(&bootstrap, log, "again", round, second);
    char line[512];
    size_t used = (size_t)snprintf(line, sizeof line, "rank %d of %d through %s%s:", bootstrap.rank, bootstrap.size,
                                   bootstrap.launcher, bootstrap.has_secret ? " with a secret" : "");
    for (int r = 0; r < bootstrap.size && used < sizeof line; r++)
        used += (size_t)snprintf(line + used, sizeof line - used, " %d", first[r] == second[r] ? first[r] : -1);
    if (status == SHOAL_OK && is_last)
        printf("%s\n", line);
    shoal_bootstrap_close(&bootstrap);
    return status;
}

/* The optional argument is the number of times to join, one after the other. */
int main(int argc, char **argv)
{
    struct shoal_settings settings;
    char error[256];
    if (shoal_settings_load(&settings, NULL, error, sizeof error) != SHOAL_OK)
        return 2;
    struct shoal_log log;
    shoal_log_init(&log, &settings.log, NULL, NULL);
    const int rounds = argc > 1 ? atoi(argv[1]) : 1;
    enum shoal_status status = SHOAL_OK;
    for (int i = 0; i < rounds && status == SHOAL_OK; i++)
        status = probe(&settings, &log, i, i == rounds - 1);
    shoal_log_fini(&log);
    return status == SHOAL_OK ? 0 : 1;
}
