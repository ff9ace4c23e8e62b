/* What /proc tells of a process. Any thread. */
#ifndef SHOAL_BASE_PROCESS_H
#define SHOAL_BASE_PROCESS_H

/* The state letter of a process, '?' when it is not visible here; the exit code of one that ended, as waitpid gives it, 0 where
 * that must not be seen. */
char shoal_process_read_stat(int pid, int *exit_code_out);

#endif
