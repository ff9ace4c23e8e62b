/* Lets a signal make this process write its flight recorders (SHOAL_DUMP_SIGNAL): for jobs that can receive signals but not
 * `shoal top --dump`. Off by default, because signals belong to the program. One signal for all contexts of a process; any
 * thread. */
#ifndef SHOAL_COMM_DUMP_H
#define SHOAL_COMM_DUMP_H

#include "comm/settings.h"

/* From now on the signal in the settings, if any, writes the recorders of all contexts of this process to the place that these
 * settings name. If another context asked earlier, its settings count until it stops. If the program handles the signal itself,
 * its handler stays and a warning says so. */
void shoal_dump_start(struct shoal_log *log, const struct shoal_settings *settings);
/* Withdraws the request made with this log. After the last request ends, the signal does nothing; it does not end the
 * process. */
void shoal_dump_stop(struct shoal_log *log);

#endif
