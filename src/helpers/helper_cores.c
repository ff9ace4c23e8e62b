#include "helpers/helper_cores.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "helpers/helpers_settings.h"
#include "topology/limits.h"
#include "topology/links.h"

int shoal_helper_cores_of_framework(const char *omp_threads, const char *gpu_file)
{
    const long threads =
        omp_threads ? strtol(omp_threads, NULL, 10) : 0; /* a list for nested regions begins with the outermost */
    if (threads > 0)
        return threads < CPU_SETSIZE ? (int)threads : CPU_SETSIZE;
    return access(gpu_file, F_OK) == 0 ? 1 : -1;
}

int shoal_helper_cores_count(int allowed, int together, int local_ranks)
{
    const int all = together > allowed ? together : allowed;
    const int each = shoal_topology_quota_cores(all) / (local_ranks > 1 ? local_ranks : 1);
    const int cores = each < allowed ? each : allowed;
    return cores > 1 ? cores : 1;
}

int shoal_helper_cores_width(struct shoal_helper_share share)
{
    const int left = share.framework_threads < 0 ? 1 : share.cores - share.framework_threads;
    return left < 1 ? 1 : left < SHOAL_HELPERS_MAX ? left : SHOAL_HELPERS_MAX;
}

bool shoal_helper_cores_parse(const char *text, cpu_set_t *cores_out)
{
    CPU_ZERO(cores_out);
    while (*text && *text != '\n') {
        char *end;
        const long first = strtol(text, &end, 10);
        long last = first;
        if (end == text || first < 0)
            return false;
        if (*end == '-') {
            const char *const number = end + 1;
            last = strtol(number, &end, 10);
            if (end == number)
                return false;
        }
        if (last < first || last >= CPU_SETSIZE || (*end && *end != ',' && *end != '\n'))
            return false;
        for (long core = first; core <= last; core++)
            CPU_SET((size_t)core, cores_out);
        text = *end == ',' ? end + 1 : end;
    }
    return true;
}

void shoal_helper_cores_stay_near(const char *sys, int least, cpu_set_t *cores)
{
    char text[4096];
    cpu_set_t node_cores, near;
    unsigned core, node;
    if (syscall(SYS_getcpu, &core, &node, NULL) != 0) /* older C libraries have no function for it */
        return;
    shoal_links_print_cores(sys, (int)node, text, sizeof text);
    if (!*text || !shoal_helper_cores_parse(text, &node_cores))
        return;
    CPU_AND(&near, cores, &node_cores);
    if (CPU_COUNT(&near) >= least)
        *cores = near;
}
