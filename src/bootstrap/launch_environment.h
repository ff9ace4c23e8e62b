/* Reads the description of a job from the environment without joining it, so that faults can be found beforehand. Opens and
 * sends nothing. Any thread. */
#ifndef SHOAL_BOOTSTRAP_LAUNCH_ENVIRONMENT_H
#define SHOAL_BOOTSTRAP_LAUNCH_ENVIRONMENT_H

#include "base/log.h"
#include "bootstrap/bootstrap_settings.h"

struct shoal_launch_environment {
    const char *launcher;                  /* "RANK and WORLD_SIZE", "PMIx", "PMI-1", "srun"; NULL: none. Static storage */
    const char *master;                    /* MASTER_ADDR, NULL where it is not set */
    int size;                              /* of the job; 0: not known */
    int local_size;                        /* ranks on this host; 0: not known */
    int master_port;                       /* 0: not set */
    int port, port_count;                  /* rank 0 takes the first free one of these; count 0: not known */
    bool has_secret;                       /* it is set, and can be used */
    char secret_error[SHOAL_LOG_TEXT_MAX]; /* it is set, and cannot; else empty */
};

/* tell is called for each other thing that would make a rank fail: "what is wrong; what to do". */
void shoal_launch_environment_read(const struct shoal_bootstrap_settings *settings, void (*tell)(void *arg, const char *error),
                                   void *arg, struct shoal_launch_environment *launch_out);

#endif
