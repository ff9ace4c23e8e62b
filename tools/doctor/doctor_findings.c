/* A list of findings: each text once, with the hosts on which it was found. */
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "doctor.h"
#include "flat_json.h"

enum { COLUMN = 24, WIDTH = 120, HOSTS_NAMED = 4 };

static const char *const levels[] = {"ok", "note", "warning", "error"};
enum { LEVELS = sizeof levels / sizeof levels[0] };

/* ---- The list ------------------------------------------------------------------------------------------------------------ */

static void host_set(struct doctor_finding *finding, int host)
{
    finding->hosts[host / 8] |= (uint8_t)(1u << host % 8);
}

static bool host_has(const struct doctor_finding *finding, int host)
{
    return finding->hosts[host / 8] >> host % 8 & 1;
}

static bool is_same(const struct doctor_finding *a, const struct doctor_finding *b)
{
    return a->level == b->level && !strcmp(a->subject, b->subject) && !strcmp(a->found, b->found) &&
           !strcmp(a->advice, b->advice);
}

static void finding_free(struct doctor_finding *finding)
{
    free((char *)(uintptr_t)finding->subject);
    free((char *)(uintptr_t)finding->found);
    free((char *)(uintptr_t)finding->advice);
}

static bool room_make(struct doctor_findings *findings)
{
    const size_t capacity = findings->capacity ? 2 * findings->capacity : 64;
    if (findings->count < findings->capacity)
        return true;
    struct doctor_finding *at = realloc(findings->at, capacity * sizeof *at);
    if (!at)
        return false;
    findings->at = at;
    findings->capacity = capacity;
    return true;
}

/* Returns the position after the last finding about the subject. */
static size_t place_find(const struct doctor_findings *findings, const char *subject)
{
    for (size_t i = findings->count; i > 0; i--)
        if (!strcmp(findings->at[i - 1].subject, subject))
            return i;
    return findings->count;
}

static void insert(struct doctor_findings *findings, const struct doctor_finding *finding, int host)
{
    struct doctor_finding copy = {.level = finding->level,
                                  .subject = strdup(finding->subject),
                                  .found = strdup(finding->found),
                                  .advice = strdup(finding->advice)};
    if (!copy.subject || !copy.found || !copy.advice || !room_make(findings)) {
        finding_free(&copy);
        findings->has_failed = true;
        return;
    }
    const size_t place = place_find(findings, copy.subject);
    memmove(&findings->at[place + 1], &findings->at[place], (findings->count++ - place) * sizeof copy);
    findings->at[place] = copy;
    host_set(&findings->at[place], host);
}

void doctor_findings_add(struct doctor_findings *findings, const struct doctor_finding *finding, int host)
{
    for (size_t i = 0; i < findings->count; i++) {
        if (is_same(&findings->at[i], finding)) {
            host_set(&findings->at[i], host);
            return;
        }
    }
    insert(findings, finding, host);
}

void doctor_findings_fini(struct doctor_findings *findings)
{
    for (size_t i = 0; i < findings->count; i++)
        finding_free(&findings->at[i]);
    free(findings->at);
}

size_t doctor_findings_count(const struct doctor_findings *findings, enum shoal_finding_level level)
{
    size_t count = 0;
    for (size_t i = 0; i < findings->count; i++)
        count += findings->at[i].level == level;
    return count;
}

/* ---- The table ----------------------------------------------------------------------------------------------------------- */

/* Prints words from the column on, in lines of WIDTH. */
static void words_print(FILE *out, const char *text)
{
    int at = COLUMN;
    while (*text) {
        const int length = (int)strcspn(text, " ");
        if (at > COLUMN && at + 1 + length > WIDTH) {
            fprintf(out, "\n%*s", COLUMN, "");
            at = COLUMN;
        }
        at += fprintf(out, "%s%.*s", at > COLUMN ? " " : "", length, text);
        text += length;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

static int hosts_count(const struct doctor_finding *finding, const struct ask_hosts *hosts)
{
    int count = 0;
    for (int i = 0; i < hosts->count; i++)
        count += host_has(finding, i);
    return count;
}

/* Returns the number of hosts with a diagnosis: each diagnosis begins with the version. */
static int answers_count(const struct doctor_findings *findings, const struct ask_hosts *hosts)
{
    int count = 0;
    for (size_t i = 0; i < findings->count; i++)
        if (!strcmp(findings->at[i].subject, "version"))
            count += hosts_count(&findings->at[i], hosts);
    return count;
}

/* Prints "n1, n2, n3, n4 and 3 more: ", or nothing if the finding is about all hosts. */
static void hosts_print(FILE *out, const struct doctor_finding *finding, const struct ask_hosts *hosts, int answers)
{
    const int count = hosts_count(finding, hosts);
    int named = 0;
    if (count == answers && strcmp(finding->subject, "host") != 0)
        return;
    for (int i = 0; i < hosts->count && named < HOSTS_NAMED; i++)
        if (host_has(finding, i))
            fprintf(out, "%s%s", named++ ? ", " : "", hosts->at[i].name);
    if (count > named)
        fprintf(out, " and %d more", count - named);
    fputs(": ", out);
}

static void finding_print(FILE *out, const struct doctor_finding *finding, const struct ask_hosts *hosts, int answers)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *line = open_memstream(&text, &bytes);
    if (!line)
        return;
    if (hosts)
        hosts_print(line, finding, hosts, answers);
    fputs(finding->found, line);
    fclose(line);
    fprintf(out, "%-8s %-14s ", levels[finding->level], finding->subject);
    words_print(out, text ? text : "");
    free(text);
    if (*finding->advice) {
        fprintf(out, "%*s-> ", COLUMN - 3, "");
        words_print(out, finding->advice);
    }
}

static void summary_print(FILE *out, const struct doctor_findings *findings)
{
    const size_t errors = doctor_findings_count(findings, SHOAL_FINDING_ERROR),
                 warnings = doctor_findings_count(findings, SHOAL_FINDING_WARNING);
    if (!errors && !warnings)
        fputs("\nnothing wrong was found\n", out);
    else
        fprintf(out, "\n%zu error%s, %zu warning%s\n", errors, errors == 1 ? "" : "s", warnings, warnings == 1 ? "" : "s");
}

void doctor_findings_print(const struct doctor_findings *findings, const struct ask_hosts *hosts, FILE *out)
{
    const int answers = hosts ? answers_count(findings, hosts) : 0;
    if (hosts)
        fprintf(out, "%d of %d host%s answered; a finding without hosts applies to all of these\n\n", answers, hosts->count,
                hosts->count == 1 ? "" : "s");
    for (size_t i = 0; i < findings->count; i++)
        finding_print(out, &findings->at[i], hosts, answers);
    summary_print(out, findings);
}

/* ---- JSON ---------------------------------------------------------------------------------------------------------------- */

static void member_print(FILE *out, const char *key, const char *text)
{
    fprintf(out, "%s\"%s\":", strcmp(key, "level") ? "," : "", key);
    shoal_json_print_text(out, text);
}

static void hosts_print_json(FILE *out, const struct doctor_finding *finding, const struct ask_hosts *hosts)
{
    int named = 0;
    fputs(",\"hosts\":[", out);
    for (int i = 0; i < hosts->count; i++) {
        if (!host_has(finding, i))
            continue;
        fputs(named++ ? "," : "", out);
        shoal_json_print_text(out, hosts->at[i].name);
    }
    fputc(']', out);
}

void doctor_findings_print_json(const struct doctor_findings *findings, const struct ask_hosts *hosts, FILE *out)
{
    for (size_t i = 0; i < findings->count; i++) {
        const struct doctor_finding *finding = &findings->at[i];
        fputc('{', out);
        member_print(out, "level", levels[finding->level]);
        member_print(out, "subject", finding->subject);
        member_print(out, "found", finding->found);
        member_print(out, "advice", finding->advice);
        if (hosts)
            hosts_print_json(out, finding, hosts);
        fputs("}\n", out);
    }
}

static bool level_find(const char *word, enum shoal_finding_level *level_out)
{
    for (int i = 0; i < LEVELS; i++) {
        if (!strcmp(levels[i], word)) {
            *level_out = (enum shoal_finding_level)i;
            return true;
        }
    }
    return false;
}

/* Text from another host goes to a terminal, so it must be printable. */
static void make_printable(char *text)
{
    for (; *text; text++)
        if (*text < ' ' || *text > '~')
            *text = '?';
}

/* Reads a member. Ignores members that a newer version adds. Returns false for an unknown level. */
static bool member_take(const struct json_reader *json, struct doctor_finding *finding, bool *has_level)
{
    if (json->kind != JSON_TEXT)
        return true;
    make_printable(json->text);
    if (!strcmp(json->key, "subject"))
        finding->subject = json->text;
    else if (!strcmp(json->key, "found"))
        finding->found = json->text;
    else if (!strcmp(json->key, "advice"))
        finding->advice = json->text;
    else if (!strcmp(json->key, "level"))
        return *has_level = level_find(json->text, &finding->level);
    return true;
}

bool doctor_finding_parse(char *line, struct doctor_finding *finding_out)
{
    struct doctor_finding finding = {.subject = NULL};
    struct json_reader json;
    enum json_step step;
    bool has_level = false;
    json_open(&json, line);
    while ((step = json_next(&json)) == JSON_MEMBER)
        if (!member_take(&json, &finding, &has_level))
            return false;
    if (step == JSON_BAD || !has_level || !finding.subject || !finding.found || !finding.advice)
        return false;
    *finding_out = finding;
    return true;
}
