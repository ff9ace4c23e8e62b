/* The user's own choice of algorithms: tuning overrides that come before the table. They are parsed when a context is made and
 * compared between ranks when a communicator is (their hash is part of the settings' hash); constant afterwards.
 *
 * SHOAL_ALGORITHMS is a list of tuning overrides, "reduce=owners,all-gather=direct@0-4K", or the name of a CSV file. A file
 * begins with the line "collective,algorithm,min_bytes,max_bytes,min_ranks,max_ranks"; a number left out bounds nothing; lines
 * that begin with # are passed over. The first tuning override for a call counts; where its algorithm cannot serve the
 * call (direct, with more than fits beside an announcement) the next one counts, and at last the table. */
#ifndef SHOAL_COLLECTIVE_TUNING_H
#define SHOAL_COLLECTIVE_TUNING_H

#include "base/setting.h"
#include "plan/collective_type.h"

struct shoal_tuning_settings {
    char algorithms[SHOAL_SETTING_TEXT_MAX];
    uint64_t hash; /* of what they stand for: put there by whoever loads them (struct shoal_tuning) */
};
extern const struct shoal_setting_table shoal_tuning_setting_table;

struct shoal_tuning_override {
    enum shoal_collective_type collective;
    char name[24]; /* of an entry of that collective */
    uint64_t min_bytes;
    uint64_t max_bytes;
    int min_ranks;
    int max_ranks;
    int line; /* where it stands: of a file, the line; of a list, the number of the tuning override */
};

struct shoal_tuning {
    char source[300]; /* for messages: the file's name, or "SHOAL_ALGORITHMS" */
    struct shoal_tuning_override *list;
    size_t count;
    uint64_t hash; /* 0: no tuning overrides */
};

/* Fills *tuning_out from the value of SHOAL_ALGORITHMS; the empty text gives no tuning overrides. On ERR_ARGUMENT, error names
 * the file and line, what is wrong with it, and what is allowed. The caller frees with shoal_tuning_fini, also after an
 * error. */
SHOAL_MUST_USE enum shoal_status shoal_tuning_load(struct shoal_tuning *tuning_out, const char *text, char *error,
                                                   size_t error_bytes);
void shoal_tuning_fini(struct shoal_tuning *tuning);

/* One line per tuning override. */
void shoal_tuning_print(const struct shoal_tuning *tuning, FILE *out);

#endif
