#include "store/kv_wire.h"

#include <string.h>

#include "base/assert.h"

/* Twice: a reply follows WELCOME, or an earlier reply that is not sent yet. */
#define OUT_BYTES_MAX (2 * (sizeof(struct shoal_link_head) + SHOAL_KEY_BYTES_MAX + SHOAL_VALUE_BYTES_MAX))

const struct shoal_link_service shoal_kv_service = {
    .protocol = SHOAL_KV_PROTOCOL,
    .kind_end = SHOAL_KV_KIND_END,
    .verdict_end = SHOAL_KV_VERDICT_END,
    .key_bytes_max = SHOAL_KEY_BYTES_MAX,
    .value_bytes_max = SHOAL_VALUE_BYTES_MAX,
    .out_bytes_max = OUT_BYTES_MAX,
};
_Static_assert(sizeof(struct shoal_agreed) <= SHOAL_LINK_GREETING_BYTES_MAX, "the greeting");

void shoal_kv_identity_agree(struct shoal_kv_identity *identity, const struct shoal_agreed_own *agreed)
{
    identity->agreed = *agreed;
    identity->link.service = &shoal_kv_service;
    identity->link.hello.protocol = SHOAL_KV_PROTOCOL;
    identity->link.hello.settings = shoal_agreed_hash(&agreed->agreed);
    identity->link.greeting.count = sizeof agreed->agreed;
    memcpy(identity->link.greeting.bytes, &agreed->agreed, sizeof agreed->agreed);
}

/* Values that another version leaves out are 0. */
static struct shoal_agreed agreed_of(const struct shoal_link_greeting *greeting)
{
    struct shoal_agreed agreed = {{0}};
    memcpy(&agreed, greeting->bytes, shoal_min_size(greeting->count, sizeof agreed));
    return agreed;
}

static void print_settings(const struct shoal_link *link, const struct shoal_agreed_own *own, char *text, size_t text_bytes)
{
    const struct shoal_agreed there = agreed_of(&link->greeting), here = agreed_of(&link->own->greeting);
    char difference[320];
    shoal_agreed_print_difference(own, link->is_client ? &here : &there, link->is_client ? &there : &here, "on rank 0",
                                  difference, sizeof difference);
    snprintf(text, text_bytes, "settings that must agree differ: %s", difference);
}

static void print_reason(const struct shoal_link *link, const struct shoal_agreed_own *own, char *text, size_t text_bytes)
{
    switch (link->verdict) {
    case SHOAL_LINK_NOT_OURS:
        snprintf(text, text_bytes, "another Shoal job (of %u ranks) listens there", link->server.size);
        return;
    case SHOAL_LINK_PAST:
        snprintf(text, text_bytes, "the rank has left that store before, and a new one has not come");
        return;
    case SHOAL_LINK_MIXED:
        snprintf(text, text_bytes, "ranks of two jobs meet there, and nothing distinguishes the jobs; " SHOAL_KV_MIXED_ADVICE);
        return;
    case SHOAL_LINK_SETTINGS:
        print_settings(link, own, text, text_bytes);
        return;
    default:
        shoal_link_refusal_print(link->verdict, &link->client, &link->server, "rank 0", "ranks", text, text_bytes);
        return;
    }
}

void shoal_kv_refusal_print(const struct shoal_link *link, const struct shoal_agreed_own *own, char *text, size_t text_bytes)
{
    char host[SHOAL_LINK_HOST_BYTES], reason[360];
    SHOAL_ASSERT(link->verdict != SHOAL_LINK_OK);
    memcpy(host, link->client.host, sizeof host);
    shoal_link_text_clean(host, sizeof host);
    print_reason(link, own, reason, sizeof reason);
    snprintf(text, text_bytes, "rank %u (%s:%u) is refused: %s", link->client.rank, host, link->client.process, reason);
}
