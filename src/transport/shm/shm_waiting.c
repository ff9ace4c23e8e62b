/* The endpoint's doorbell as the progress engine sees it (transport/waiting.h). */
#include "transport/shm/shm_endpoint.h"

static void waiting_ring(void *endpoint)
{
    shoal_shm_doorbell_ring(((struct shoal_shm_endpoint *)endpoint)->doorbell);
}

static void waiting_doze(void *endpoint)
{
    shoal_shm_endpoint_doze(endpoint);
}

static void waiting_doze_briefly(void *endpoint)
{
    shoal_shm_endpoint_doze_briefly(endpoint);
}

static void waiting_sleep(void *endpoint, uint64_t timeout_ns)
{
    shoal_shm_endpoint_sleep(endpoint, timeout_ns);
}

static void waiting_awake(void *endpoint)
{
    shoal_shm_endpoint_awake(endpoint);
}

static void waiting_check(void *endpoint)
{
    shoal_shm_endpoint_drain(endpoint);
}

static int waiting_cores(void *endpoint)
{
    return shoal_shm_endpoint_cores(endpoint);
}

static bool waiting_meet_on_core(void *endpoint, int core, cpu_set_t *taken_out)
{
    return shoal_shm_endpoint_meet_on_core(endpoint, core, taken_out);
}

struct shoal_doorbell shoal_shm_endpoint_doorbell(struct shoal_shm_endpoint *endpoint)
{
    static const struct shoal_doorbell_ops ops = {waiting_ring,  waiting_doze,  waiting_doze_briefly, waiting_sleep,
                                                  waiting_awake, waiting_check, waiting_cores,        waiting_meet_on_core};
    return (struct shoal_doorbell){&ops, endpoint};
}
