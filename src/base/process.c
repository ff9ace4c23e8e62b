#include "base/process.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Fields of /proc/PID/stat (proc(5)). The second is the program's name in parentheses, which may contain any character. */
#define FIELD_NAME 2
#define FIELD_EXIT_CODE 52

char shoal_process_read_stat(int pid, int *exit_code_out)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    const size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[got] = 0;
    const char *name_end = strrchr(text, ')'), *at = name_end;
    for (int field = FIELD_NAME; at && field < FIELD_EXIT_CODE; field++)
        at = strchr(at + 1, ' ');
    *exit_code_out = at ? (int)strtol(at, NULL, 10) : 0;
    return name_end && name_end[1] == ' ' ? name_end[2] : '?';
}

int shoal_process_number(int pidfd)
{
    char path[64], line[128];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", pidfd);
    FILE *file = pidfd >= 0 ? fopen(path, "re") : NULL;
    while (file && fgets(line, sizeof line, file) && sscanf(line, "Pid: %d", &pid) != 1)
        continue;
    if (file)
        fclose(file);
    return pid > 0 ? pid : 0;
}
