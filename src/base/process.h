/* Reads /proc files of a process. Any thread. */
#ifndef SHOAL_BASE_PROCESS_H
#define SHOAL_BASE_PROCESS_H

/* Returns the state letter of a process, or '?' if it is not visible here. Stores the exit code of a process that has ended, as
 * waitpid() returns it, or 0 if this process may not see it. */
char shoal_process_read_stat(int pid, int *exit_code_out);

/* Returns the number that a process has in this PID namespace, whatever its number in its own. Returns 0 if it is not visible
 * here, or its parent has collected it. */
int shoal_process_number(int pidfd);

#endif
