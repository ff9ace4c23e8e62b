/* A signal that makes this process write its flight recorders (SHOAL_DUMP_SIGNAL): for jobs that can be sent signals, but not
 * asked by `shoal top --dump`. Off by default: signals belong to the program. One for all contexts of a process; any thread. */
#ifndef SHOAL_COMM_DUMP_H
#define SHOAL_COMM_DUMP_H

#include "comm/settings.h"

/* From now on the signal that the settings name, if any, writes the recorders of all contexts of this process, where these
 * settings say. When another context has asked before, its settings count until it stops. A program that handles the signal
 * itself keeps it, and a warning says so. */
void shoal_dump_start(struct shoal_log *log, const struct shoal_settings *settings);
/* Takes back what was asked with this log. When nobody asks any more, the signal does nothing; it does not end the process. */
void shoal_dump_stop(struct shoal_log *log);

#endif
