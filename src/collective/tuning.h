/* The user's own choice of algorithms: tuning overrides that precede the table. They are parsed when a context is created and
 * compared between ranks when a communicator is created (their hash is part of the settings' hash); constant afterwards.
 *
 * SHOAL_ALGORITHMS is a list of tuning overrides, "reduce=owners,all-gather=direct@0-4K", or the name of a CSV file. A file
 * begins with the line "collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks"; an omitted number is no bound; lines
 * that begin with # are ignored. The first tuning override for a call applies. If its algorithm cannot serve the call (such as
 * direct, with more data than fit with an announcement), the next one applies, and finally the table. */
#ifndef SHOAL_COLLECTIVE_TUNING_H
#define SHOAL_COLLECTIVE_TUNING_H

#include "base/setting.h"
#include "plan/collective_type.h"

struct shoal_tuning_settings {
    char algorithms[SHOAL_SETTING_TEXT_MAX];
    uint64_t hash; /* of the overrides; set by their reader (struct shoal_tuning) */
};
extern const struct shoal_setting_table shoal_tuning_setting_table;

struct shoal_tuning_override {
    enum shoal_collective_type collective;
    char name[24]; /* of an entry of that collective */
    uint64_t min_bytes;
    uint64_t max_bytes;
    int min_ranks;
    int max_ranks;
    int line; /* position: line of a file, or number in a list */
};

struct shoal_tuning {
    char source[300]; /* for messages: the file's name, or "SHOAL_ALGORITHMS" */
    struct shoal_tuning_override *list;
    size_t count;
    uint64_t hash; /* 0 without tuning overrides */
};

/* Fills *tuning_out from the value of SHOAL_ALGORITHMS. An empty text means no tuning overrides. On ERR_ARGUMENT, `error` names
 * the file and line, what is wrong with it, and what is allowed. The caller frees with shoal_tuning_fini(), even after an
 * error. */
SHOAL_MUST_USE enum shoal_status shoal_tuning_load(struct shoal_tuning *tuning_out, const char *text, char *error,
                                                   size_t error_bytes);
void shoal_tuning_fini(struct shoal_tuning *tuning);

/* Prints one line per tuning override. */
void shoal_tuning_print(const struct shoal_tuning *tuning, FILE *out);

#endif
