#include "store/kv_wire.h"

#include <string.h>

static bool kv_is_head_sound(const struct shoal_kv_head *head, size_t value_max)
{
    return head->magic == SHOAL_KV_MAGIC && head->kind >= SHOAL_KV_HELLO && head->kind < SHOAL_KV_KIND_END &&
           head->verdict < SHOAL_KV_VERDICT_END && head->key_bytes <= SHOAL_KEY_BYTES_MAX && head->value_bytes <= value_max;
}

enum shoal_kv_parsed shoal_kv_frame_parse(const unsigned char *data, size_t bytes, size_t value_max,
                                          struct shoal_kv_frame *frame_out)
{
    struct shoal_kv_frame frame;
    if (bytes < sizeof frame.head)
        return SHOAL_KV_PARSED_MORE;
    memcpy(&frame.head, data, sizeof frame.head);
    if (!kv_is_head_sound(&frame.head, value_max))
        return SHOAL_KV_PARSED_BAD;
    frame.bytes = sizeof frame.head + frame.head.key_bytes + frame.head.value_bytes;
    if (bytes < frame.bytes)
        return SHOAL_KV_PARSED_MORE;
    frame.key = (const char *)data + sizeof frame.head;
    frame.value = data + sizeof frame.head + frame.head.key_bytes;
    *frame_out = frame;
    return SHOAL_KV_PARSED_FRAME;
}

void shoal_kv_text_clean(char *text, size_t bytes)
{
    text[bytes - 1] = 0;
    for (char *p = text; *p; p++) {
        if (*p < ' ' || *p > '~')
            *p = '?';
    }
}

bool shoal_kv_side_parse(const struct shoal_kv_frame *frame, struct shoal_kv_side *side_out)
{
    if (frame->head.value_bytes < sizeof side_out->hello)
        return false;
    memset(side_out, 0, sizeof *side_out);
    memcpy(side_out, frame->value, shoal_min_size(frame->head.value_bytes, sizeof *side_out));
    return true;
}

enum shoal_kv_verdict shoal_kv_hello_judge(const struct shoal_kv_hello *client, const struct shoal_kv_hello *server)
{
    if (client->job != server->job)
        return SHOAL_KV_NOT_OURS;
    if (client->protocol != server->protocol || memcmp(client->version, server->version, sizeof client->version) != 0)
        return SHOAL_KV_VERSION;
    if (client->size != server->size)
        return SHOAL_KV_SIZE;
    if (client->rank >= server->size)
        return SHOAL_KV_RANK;
    if (client->settings != server->settings)
        return SHOAL_KV_SETTINGS;
    if (!client->has_secret != !server->has_secret)
        return SHOAL_KV_SECRET_ONE_SIDED;
    return SHOAL_KV_OK;
}

enum shoal_status shoal_kv_verdict_status(enum shoal_kv_verdict verdict)
{
    switch (verdict) {
    case SHOAL_KV_OK:
        return SHOAL_OK;
    case SHOAL_KV_SIZE:
    case SHOAL_KV_RANK:
    case SHOAL_KV_TAKEN:
    case SHOAL_KV_MIXED:
        return SHOAL_ERR_ARGUMENT;
    case SHOAL_KV_VERSION:
    case SHOAL_KV_SETTINGS:
    case SHOAL_KV_SECRET_ONE_SIDED:
    case SHOAL_KV_SECRET_WRONG:
        return SHOAL_ERR_AUTH;
    case SHOAL_KV_NOT_OURS:
    case SHOAL_KV_PAST:
    case SHOAL_KV_ABSENT:
        return SHOAL_ERR_TIMEOUT;
    case SHOAL_KV_LOST:
        return SHOAL_ERR_PEER_LOST;
    case SHOAL_KV_FULL:
        return SHOAL_ERR_MEMORY;
    case SHOAL_KV_VERDICT_END:
        break;
    }
    return SHOAL_ERR_INTERNAL;
}

static void settings_text(const struct shoal_agreed_own *own, const struct shoal_agreed *client,
                          const struct shoal_agreed *server, char *text, size_t text_bytes)
{
    char difference[320];
    shoal_agreed_print_difference(own, client, server, "on rank 0", difference, sizeof difference);
    snprintf(text, text_bytes, "settings that must agree differ: %s", difference);
}

static void refusal_text(enum shoal_kv_verdict verdict, const struct shoal_kv_hello *client,
                         const struct shoal_kv_hello *server, char *text, size_t text_bytes)
{
    switch (verdict) {
    case SHOAL_KV_NOT_OURS:
        snprintf(text, text_bytes, "another Shoal job (of %u ranks) listens there", server->size);
        return;
    case SHOAL_KV_PAST:
        snprintf(text, text_bytes, "the rank has left that store before, and a new one has not come");
        return;
    case SHOAL_KV_VERSION:
        snprintf(text, text_bytes,
                 "it runs Shoal %s (protocol %u) and rank 0 runs %s (protocol %u); install one version everywhere",
                 client->version, client->protocol, server->version, server->protocol);
        return;
    case SHOAL_KV_SIZE:
        snprintf(text, text_bytes, "it counts %u ranks, and rank 0 counts %u", client->size, server->size);
        return;
    case SHOAL_KV_RANK:
        snprintf(text, text_bytes, "there are only ranks 0 to %u", server->size - 1);
        return;
    case SHOAL_KV_TAKEN:
        snprintf(text, text_bytes, "two processes claim to be this rank, or an earlier process of this rank has ended");
        return;
    case SHOAL_KV_MIXED:
        snprintf(text, text_bytes, "ranks of two jobs meet there, and nothing distinguishes the jobs; " SHOAL_KV_MIXED_ADVICE);
        return;
    case SHOAL_KV_SECRET_ONE_SIDED:
        snprintf(text, text_bytes, "%s has a secret and %s has none; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks",
                 client->has_secret ? "it" : "rank 0", client->has_secret ? "rank 0" : "it");
        return;
    default:
        snprintf(text, text_bytes, "its secret is not rank 0's; set SHOAL_SECRET or SHOAL_SECRET_FILE alike on all ranks");
        return;
    }
}

void shoal_kv_refusal_print(enum shoal_kv_verdict verdict, const struct shoal_agreed_own *own,
                            const struct shoal_kv_side *client, const struct shoal_kv_side *server, char *text,
                            size_t text_bytes)
{
    struct shoal_kv_hello there = client->hello, here = server->hello;
    shoal_kv_text_clean(there.version, sizeof there.version);
    shoal_kv_text_clean(there.host, sizeof there.host);
    shoal_kv_text_clean(here.version, sizeof here.version);
    char reason[360];
    if (verdict == SHOAL_KV_SETTINGS)
        settings_text(own, &client->agreed, &server->agreed, reason, sizeof reason);
    else
        refusal_text(verdict, &there, &here, reason, sizeof reason);
    snprintf(text, text_bytes, "rank %u (%s:%u) is refused: %s", there.rank, there.host, there.process, reason);
}

bool shoal_kv_proof_build(const unsigned char secret[SHOAL_SECRET_BYTES], bool of_server, const struct shoal_kv_hello *client,
                          const struct shoal_kv_hello *server, unsigned char proof[SHOAL_AUTH_MAC_BYTES])
{
    memset(proof, 0, SHOAL_AUTH_MAC_BYTES);
    if (!server->has_secret)
        return true;
    static const char sides[2][24] = {"shoal store client", "shoal store server"};
    const struct shoal_auth_span spans[] = {
        {sides[of_server], sizeof sides[0]}, {client, sizeof *client}, {server, sizeof *server}};
    return shoal_auth_mac(secret, spans, SHOAL_COUNT_OF(spans), proof);
}
