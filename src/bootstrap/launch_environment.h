/* Reads the description of a job from the environment without joining it, so that faults can be found beforehand. Opens and
 * sends nothing. Any thread. */
#ifndef SHOAL_BOOTSTRAP_LAUNCH_ENVIRONMENT_H
#define SHOAL_BOOTSTRAP_LAUNCH_ENVIRONMENT_H

#include "base/log.h"
#include "bootstrap/bootstrap_settings.h"

struct shoal_launch_environment {
    const char *launcher;                  /* "RANK and WORLD_SIZE", "PMIx", "PMI-1", "srun" or NULL; static storage */
    const char *master;                    /* MASTER_ADDR, or NULL if it is not set */
    int size;                              /* of the job; 0 if unknown */
    int local_size;                        /* ranks on this host; 0 if unknown */
    int master_port;                       /* 0 if not set */
    int port, port_count;                  /* rank 0 listens at the first free one of these ports; count 0 if unknown */
    bool has_secret;                       /* a secret is set and usable */
    char secret_error[SHOAL_LOG_TEXT_MAX]; /* why a secret that is set is not usable; else empty */
};

/* Calls `tell` for each further fault that would make a rank fail, with a text such as "what is wrong; what to do". */
void shoal_launch_environment_read(const struct shoal_bootstrap_settings *settings, void (*tell)(void *arg, const char *error),
                                   void *arg, struct shoal_launch_environment *launch_out);

#endif
