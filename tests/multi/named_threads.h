/* The library's threads in this process, by the beginning of their names. */
#ifndef SHOAL_TESTS_NAMED_THREADS_H
#define SHOAL_TESTS_NAMED_THREADS_H

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static inline int count_threads_named(const char *begin)
{
    char path[300], name[32];
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        FILE *file = fopen(path, "re");
        count += file && fgets(name, sizeof name, file) && strncmp(name, begin, strlen(begin)) == 0;
        if (file)
            fclose(file);
    }
    if (folder)
        closedir(folder);
    return count;
}

/* Waits until there are none, because a thread that has been joined may still be listed for a moment. */
static inline bool have_threads_ended(const char *begin)
{
    for (int ms = 0; ms < 10000 && count_threads_named(begin) > 0; ms++)
        usleep(1000);
    return count_threads_named(begin) == 0;
}

#endif
