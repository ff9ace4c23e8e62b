/* Reads from /proc about a process. Any thread. */
#ifndef SHOAL_BASE_PROCESS_H
#define SHOAL_BASE_PROCESS_H

/* The state letter of a process, '?' when it is not visible here; the exit code of one that ended, as waitpid gives it, 0 where
 * that must not be seen. */
char shoal_process_read_stat(int pid, int *exit_code_out);

/* The number that /proc gives the process here, whatever it calls itself in a PID namespace of its own: 0 when it is not to be
 * seen there, or its parent has collected it. */
int shoal_process_number(int pidfd);

#endif
