/* On failure, a recorder without a file from the user is written to the user's own folder in the temporary folder, one file per
 * process. Files of earlier jobs are removed, except the newest. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "observe/recorder.h"

#define BEGINNING "flight-"

/* ---- The folder ---------------------------------------------------------------------------------------------------------- */

/* Returns false with errno set on failure, and if a folder of that name belongs to another user. */
static bool make_folder(const char *folder)
{
    struct stat status;
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        return false;
    if (lstat(folder, &status) != 0)
        return false;
    errno = S_ISDIR(status.st_mode) ? EPERM : ENOTDIR;
    return S_ISDIR(status.st_mode) && status.st_uid == geteuid() && !(status.st_mode & (S_IWGRP | S_IWOTH));
}

/* ---- Files of earlier jobs ----------------------------------------------------------------------------------------------- */

struct old_file {
    struct timespec changed;
    char name[128];
};

static int newest_first(const void *a, const void *b)
{
    const struct timespec *x = &((const struct old_file *)a)->changed, *y = &((const struct old_file *)b)->changed;
    if (x->tv_sec != y->tv_sec)
        return x->tv_sec < y->tv_sec ? 1 : -1;
    return (x->tv_nsec < y->tv_nsec) - (x->tv_nsec > y->tv_nsec);
}

/* Lists the recorders of other jobs; names of this job's begin with `own`. Returns their number, or -1 without memory. */
static int list_old(DIR *folder, const char *own, struct old_file **files_out)
{
    struct dirent *entry;
    struct stat status;
    int count = 0, room = 0;
    while ((entry = readdir(folder)) != NULL) {
        if (strncmp(entry->d_name, BEGINNING, strlen(BEGINNING)) != 0 || strncmp(entry->d_name, own, strlen(own)) == 0 ||
            strlen(entry->d_name) >= sizeof(*files_out)->name ||
            fstatat(dirfd(folder), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode))
            continue;
        if (count == room) {
            room = room ? 2 * room : 64;
            struct old_file *larger = reallocarray(*files_out, (size_t)room, sizeof *larger);
            if (!larger)
                return -1;
            *files_out = larger;
        }
        (*files_out)[count].changed = status.st_mtim;
        strcpy((*files_out)[count++].name, entry->d_name);
    }
    return count;
}

/* Other ranks may do this at the same time. */
static void remove_old(const char *path, const char *own)
{
    struct old_file *files = NULL;
    DIR *folder = opendir(path);
    const int count = folder ? list_old(folder, own, &files) : 0;
    if (count > SHOAL_RECORDERS_KEPT)
        qsort(files, (size_t)count, sizeof *files, newest_first);
    for (int i = SHOAL_RECORDERS_KEPT; i < count; i++)
        unlinkat(dirfd(folder), files[i].name, 0);
    if (folder)
        closedir(folder);
    free(files);
}

/* ---- Keeping ------------------------------------------------------------------------------------------------------------- */

bool shoal_recorder_find_path(const struct shoal_recorder *recorder, char *pattern, size_t pattern_bytes, char *all,
                              size_t all_bytes)
{
    char folder[SHOAL_SETTING_TEXT_MAX], own[64];
    const int folder_bytes =
        snprintf(folder, sizeof folder, "%s/shoal-%u", shoal_setting_temporary_folder(), (unsigned)geteuid());
    snprintf(own, sizeof own, BEGINNING "%016llx-", (unsigned long long)recorder->job);
    const int bytes = snprintf(pattern, pattern_bytes, "%s/%sr%%r-%%p", folder, own);
    snprintf(all, all_bytes, "%s/%s*", folder, own);
    errno = ENAMETOOLONG;
    if (folder_bytes >= (int)sizeof folder || bytes >= (int)pattern_bytes || !make_folder(folder))
        return false;
    remove_old(folder, own);
    return true;
}
