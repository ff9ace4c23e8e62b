/* Shared by the files of `shoal doctor`. Findings of one host or of many become one list (doctor_findings.c). Other hosts are
 * reached through a program such as ssh (doctor_hosts.c). Everything runs on the main thread. */
#ifndef SHOAL_TOOLS_DOCTOR_H
#define SHOAL_TOOLS_DOCTOR_H

#include "ask.h"
#include "tool.h"

struct doctor_options {
    const char *file;    /* file of hosts; NULL: this host alone */
    const char *via;     /* program that runs a command on a host */
    const char *shoal;   /* name of `shoal` there */
    const char *towards; /* NULL: no particular host */
    int ranks;           /* 0: not given */
    uint64_t timeout_ms; /* 0: the preset */
    bool json;
};

struct doctor_finding {
    enum shoal_finding_level level;
    const char *subject, *found, *advice; /* in a list: the list's own copies */
    uint8_t hosts[ASK_HOSTS_MAX / 8];     /* a bit for each host on which it was found */
};

struct doctor_findings {
    struct doctor_finding *at;
    size_t count, capacity;
    bool has_failed; /* out of memory: some findings are missing */
};

/* Adds a finding of the host with that number. If the list has the finding already, adds the host to it. Findings about one
 * subject stay together. */
void doctor_findings_add(struct doctor_findings *findings, const struct doctor_finding *finding, int host);
void doctor_findings_fini(struct doctor_findings *findings);
size_t doctor_findings_count(const struct doctor_findings *findings, enum shoal_finding_level level);

/* Prints a table, or one object per line. If hosts is NULL, all findings are of this host. */
void doctor_findings_print(const struct doctor_findings *findings, const struct ask_hosts *hosts, FILE *out);
void doctor_findings_print_json(const struct doctor_findings *findings, const struct ask_hosts *hosts, FILE *out);

/* Parses such an object of one host; the texts point into the line. Returns false if it is not a finding. */
bool doctor_finding_parse(char *line, struct doctor_finding *finding_out);

/* Runs `shoal doctor` on all hosts at the same time; each has timeout_ms. A host that does not answer is a finding. */
void doctor_hosts_ask(const struct ask_hosts *hosts, const struct doctor_options *options, struct doctor_findings *findings);

#endif
