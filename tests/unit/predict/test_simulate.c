/* shoal_simulate: the model's result in cases that can be computed by hand, the direction in which parameters change it, the
 * prediction of chunks that were not simulated, and invalid questions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc_limit.h"
#include "collective/select.h"
#include "predict/predict_copiers.h"
#include "predict/predict_script.h"
#include "predict/predict_wire.h"

#define MIB ((size_t)1 << 20)
#define US SHOAL_PS_PER_US

/* ---- Asking -------------------------------------------------------------------------------------------------------------- */

static struct shoal_simulation question_of(const char *collective, size_t hosts, size_t ranks_per_host, size_t bytes)
{
    struct shoal_simulation question = SHOAL_SIMULATION_INIT;
    question.collective = collective;
    question.hosts = hosts;
    question.ranks_per_host = ranks_per_host;
    question.bytes = bytes;
    return question;
}

static struct shoal_simulated ask(const struct shoal_simulation *question)
{
    struct shoal_simulated answer = SHOAL_SIMULATED_INIT;
    char reason[600] = "";
    FILE *out = fmemopen(reason, sizeof reason, "w");
    assert_non_null(out);
    const enum shoal_status status = shoal_simulate(question, out, &answer);
    fclose(out);
    if (status != SHOAL_OK)
        fail_msg("%s of %zu bytes on %zu hosts of %zu: %s", question->collective, question->bytes, question->hosts,
                 question->ranks_per_host, reason);
    return answer;
}

static double time_us(const struct shoal_simulation *question)
{
    return ask(question).time_us;
}

static void assert_near(double value, double wanted, double share)
{
    if (!(fabs(value - wanted) <= share * fabs(wanted)))
        fail_msg("%.9g is not %.9g to within %g", value, wanted, share);
}

/* Leaves only the network's time. */
static struct shoal_simulation without_cpu(struct shoal_simulation question)
{
    question.message_us = question.signal_us = 0;
    question.memory_gb_s = 1e6;
    question.header_bytes = 0;
    return question;
}

/* Counts only crossings of the network. */
static double crossings(const char *collective, size_t hosts, size_t ranks_per_host, size_t bytes)
{
    struct shoal_simulation question = without_cpu(question_of(collective, hosts, ranks_per_host, bytes));
    question.latency_us = 1e6;
    question.rate_gbit_s = 1e6;
    return time_us(&question) / 1e6;
}

/* ---- By hand ------------------------------------------------------------------------------------------------------------- */

/* Packed and published, sent, on the wire with record and header, received, added. */
static void simulate_one_message_takes_the_sum_of_its_parts(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 2, 1, 1024);
    const double wire = (SHOAL_SCRIPT_ANNOUNCEMENT_BYTES + 64 + 1024) * 8e-3 / question.rate_gbit_s,
                 memory = 1e-3 / question.memory_gb_s;
    (void)state;
    const struct shoal_simulated answer = ask(&question);
    assert_string_equal(answer.algorithm, "direct");
    assert_near(answer.time_us, 2 * 1024 * memory + 0.2 + 2 + wire + 30 + 2 + 3 * 1024 * memory, 1e-7);
    question.stack_gb_s = 4;
    assert_near(time_us(&question) - answer.time_us, 2 * (SHOAL_SCRIPT_ANNOUNCEMENT_BYTES + 1024) * 1e-3 / 4, 1e-5);
}

/* Bytes that find tokens travel at the burst's rate, or in no time; the others wait for tokens. */
static void simulate_a_burst_does_not_wait_for_the_rate(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 2, 1, 1024);
    const double sent = SHOAL_SCRIPT_ANNOUNCEMENT_BYTES + 64 + 1024, us = time_us(&question);
    (void)state;
    question.rate_gbit_s = 1;
    const double rest_us = us - sent * 8e-3 / 25;
    question.burst_bytes = 2000;
    assert_near(time_us(&question), rest_us, 1e-7);
    question.burst_gbit_s = 10;
    assert_near(time_us(&question), rest_us + sent * 8e-3 / 10, 1e-7);
    question.burst_bytes = 500;
    assert_near(time_us(&question), rest_us + (sent - 500) * 8e-3, 1e-7);
    question.pause_us = 0.4; /* 4 us of tokens fit, and more come until the message is sent */
    const double before_us = 2 * 1024 * 1e-3 / question.memory_gb_s + 0.2 + 2;
    assert_near(time_us(&question), rest_us + (sent - 500) * 8e-3 + 4 - 0.4 - before_us, 1e-7);
    question.burst_bytes = 1;
    question.pause_us = 0;
    assert_near(time_us(&question), rest_us + (sent - 1) * 8e-3, 1e-7);
}

/* A stream of any length gains from one burst. Latency counts three times: records, clear-to-sends, data. */
static void simulate_a_burst_is_gained_once(void **state)
{
    struct shoal_simulation question = without_cpu(question_of("allgather", 2, 1, 256 * MIB));
    (void)state;
    question.rate_gbit_s = 1;
    for (size_t burst = MIB; burst <= 16 * MIB; burst *= 4) {
        question.burst_bytes = burst;
        const struct shoal_simulated answer = ask(&question);
        assert_near(answer.bound_us, (double)(128 * MIB - burst) * 8e-3, 1e-9);
        assert_true(answer.time_us >= answer.bound_us && answer.time_us <= answer.bound_us + 3.2 * question.latency_us);
        assert_true(answer.sending <= 1 && answer.receiving <= 1);
    }
    question.burst_bytes = 200 * MIB; /* all */
    question.burst_gbit_s = 10;
    const double us = time_us(&question);
    question.burst_bytes = 0;
    question.rate_gbit_s = 10;
    assert_near(us, time_us(&question), 1e-9);
}

/* Both hosts send, and both receive: on one core, one after the other. */
static void simulate_hosts_on_one_machine_share_its_cores(void **state)
{
    struct shoal_simulation question = question_of("barrier", 2, 1, 0);
    (void)state;
    question.message_us = 1e6;
    assert_near(time_us(&question), 2e6, 1e-3);
    question.one_machine = 1;
    assert_near(time_us(&question), 2e6, 1e-3);
    question.cores = 1;
    assert_near(time_us(&question), 4e6, 1e-3);
    question.one_machine = 0;
    assert_near(time_us(&question), 2e6, 1e-3);
}

static void simulate_inside_a_host_memory_counts(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 1, 1, 64 * MIB);
    const double read_us = 64.0 * 1048576 * 1e-3 / question.memory_gb_s;
    (void)state;
    assert_near(time_us(&question), 2 * read_us, 1e-4);
    question.ranks_per_host = 2; /* each adds two halves and writes the result to both */
    question.shared = 1;
    assert_near(time_us(&question), 2 * read_us, 0.01);
    question.shared =
        0; /* stages half, adds two halves into output and staging buffer, copies half out of the other's staging buffer */
    assert_near(time_us(&question), (1 + 2 + 1) * read_us, 0.01);
}

/* Rounds have only their own crossings. Plans have records, clear-to-sends if there are staging buffers, and the algorithm's
 * own. */
static void simulate_crossings_add_up(void **state)
{
    (void)state;
    assert_near(crossings("barrier", 2, 1, 0), 1, 1e-3);
    assert_near(crossings("barrier", 32, 1, 0), 5, 1e-3);
    assert_near(crossings("allreduce", 4, 8, 4096), 1 + 1 + 2, 1e-3);
    assert_near(crossings("allreduce", 32, 1, 4096), 5, 1e-3);
    assert_near(crossings("allreduce", 64, 2, 4096), 6, 1e-3);
    assert_near(crossings("allgather", 20, 1, 4096 * 20), 1 + 1 + 1, 1e-3);
    assert_near(crossings("broadcast", 20, 1, 65536), 1 + 1 + 2, 1e-3);
}

static void simulate_large_vectors_tend_to_the_wire(void **state)
{
    static const struct {
        const char *collective;
        size_t hosts;
        double share;
    } cases[] = {{"allreduce", 2, 0.02}, {"allreduce", 4, 0.02}, {"allreduce", 7, 0.03}, {"reducescatter", 4, 0.02},
                 {"allgather", 4, 0.02}, {"broadcast", 2, 0.02}, {"broadcast", 5, 0.03}, {"reduce", 2, 0.02},
                 {"scatter", 4, 0.02},   {"gather", 4, 0.02},    {"alltoall", 4, 0.02}};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(cases); i++) {
        struct shoal_simulation question = without_cpu(question_of(cases[i].collective, cases[i].hosts, 1, 256 * MIB));
        const double n = (double)(256 * MIB), others = (double)(cases[i].hosts - 1) / (double)cases[i].hosts;
        const bool is_whole = !strcmp(cases[i].collective, "broadcast") || !strcmp(cases[i].collective, "reduce");
        const double carried = is_whole ? 1 : !strcmp(cases[i].collective, "allreduce") ? 2 * others : others;
        question.latency_us = 5; /* so that four chunks cover a round trip */
        question.rate_gbit_s = 10;
        const struct shoal_simulated answer = ask(&question);
        assert_near(answer.bound_us, carried * n * 8e-3 / 10, 1e-6);
        assert_near(answer.time_us, answer.bound_us, cases[i].share);
        assert_true(answer.time_us >= answer.bound_us);
    }
}

/* The count contains the plans' puts, and an announcement to each peer. */
static void simulate_counts_what_is_sent(void **state)
{
    (void)state;
    for (size_t hosts = 2; hosts <= 8; hosts *= 2) {
        const struct shoal_simulation question = question_of("allreduce", hosts, 1, 64 * MIB);
        const struct shoal_simulated answer = ask(&question);
        const double others = (double)(hosts - 1), peers = hosts > 2 ? 2 : 1; /* in a ring */
        assert_near(answer.sent_bytes,
                    2 * others / (double)hosts * (double)(64 * MIB) + SHOAL_SCRIPT_ANNOUNCEMENT_BYTES * peers, 1e-12);
        assert_near(answer.received_bytes, answer.sent_bytes, 1e-12);
        assert_near(answer.working + answer.messaging + answer.waiting, 1, 1e-9);
        assert_near(answer.algbw_gb_s, (double)(64 * MIB) / answer.time_us * 1e-3, 1e-9);
        assert_near(answer.busbw_gb_s, answer.algbw_gb_s * 2 * others / (double)hosts, 1e-9);
    }
}

/* ---- The network alone --------------------------------------------------------------------------------------------------- */

#define FRAME 65536u

struct network {
    struct shoal_model model;
    struct shoal_events events;
    struct shoal_wire wire;
};

/* A frame takes a microsecond to send, and two to travel. */
static void network_open(struct network *network, int hosts)
{
    network->model = (struct shoal_model){.latency_ps = 2 * US, .wire_ps = (double)US / FRAME, .frame_bytes = FRAME};
    assert_int_equal(shoal_events_init(&network->events, 2 * (uint32_t)hosts), SHOAL_OK);
    assert_int_equal(shoal_wire_init(&network->wire, &network->model, hosts, &network->events, 0), SHOAL_OK);
}

static void network_close(struct network *network)
{
    shoal_wire_fini(&network->wire);
    shoal_events_fini(&network->events);
}

static void send_frames(struct network *network, int from, int to, uint16_t slot, unsigned frames)
{
    const struct shoal_wire_message message = {
        .from = (uint16_t)from, .to = (uint16_t)to, .slot = slot, .bytes = (uint64_t)frames * FRAME};
    assert_int_equal(shoal_wire_send(&network->wire, from, to, &message), SHOAL_OK);
}

/* Waits for the next message received anywhere; returns its slot and when it came. */
static unsigned receive_next(struct network *network, uint64_t *us_out)
{
    const uint32_t hosts = (uint32_t)network->wire.hosts;
    uint32_t id;
    int rank, slot;
    while (shoal_events_pop(&network->events, &id)) {
        if (id < hosts) {
            shoal_wire_sent(&network->wire, (int)id, &rank, &slot);
            continue;
        }
        const uint32_t message = shoal_wire_received(&network->wire, (int)(id - hosts));
        const unsigned received = network->wire.messages[message].slot;
        shoal_wire_release(&network->wire, message);
        *us_out = network->events.now_ps / US;
        return received;
    }
    fail_msg("nothing more is received");
    return 0;
}

static void assert_received(struct network *network, unsigned slot, uint64_t us)
{
    uint64_t at_us = 0;
    assert_int_equal(receive_next(network, &at_us), slot);
    assert_int_equal(at_us, us);
}

static void wire_hosts_take_turns_and_each_has_its_order(void **state)
{
    struct network network;
    (void)state;
    network_open(&network, 3);
    send_frames(&network, 0, 1, 1, 3);
    send_frames(&network, 0, 1, 2, 1);
    send_frames(&network, 0, 2, 3, 2);
    assert_received(&network, 1, 2 + 4); /* its second frame was sent when no other was waiting */
    assert_received(&network, 3, 2 + 5);
    assert_received(&network, 2, 2 + 6);
    network_close(&network);
}

static void wire_receives_one_after_the_other(void **state)
{
    struct network network;
    (void)state;
    network_open(&network, 4);
    send_frames(&network, 1, 0, 1, 2);
    send_frames(&network, 2, 0, 2, 2);
    send_frames(&network, 3, 1, 3, 2); /* into another adapter, at the same time */
    assert_received(&network, 3, 2 + 2);
    assert_received(&network, 1, 2 + 3);
    assert_received(&network, 2, 2 + 4);
    network_close(&network);
}

/* A bucket holds two frames. Frames that it lets through at once also pass the receiver's bucket at once. */
static void wire_sends_at_once_what_finds_tokens(void **state)
{
    struct network network;
    (void)state;
    network_open(&network, 2);
    network.model.burst_ps = 2 * US;
    for (uint16_t slot = 1; slot <= 5; slot++)
        send_frames(&network, 0, 1, slot, 1);
    assert_received(&network, 1, 2 + 0);
    assert_received(&network, 2, 2 + 0);
    assert_received(&network, 3, 2 + 1);
    assert_received(&network, 4, 2 + 2);
    assert_received(&network, 5, 2 + 3);
    assert_int_equal(shoal_wire_lacking(&network.wire), 2 * US); /* the sender's bucket is full again, the receiver's empty */
    send_frames(&network, 0, 1, 6, 3);
    assert_received(&network, 6, 5 + 2 + 1);
    network_close(&network);
}

static void wire_tokens_come_at_the_rate(void **state)
{
    struct network network;
    (void)state;
    network_open(&network, 2);
    network.model.burst_ps = 2 * US;
    network.model.latency_ps = 0;
    send_frames(&network, 0, 1, 1, 4);
    assert_received(&network, 1, 2);
    assert_int_equal(shoal_wire_lacking(&network.wire), 2 * 2 * US); /* of two buckets, both empty */
    send_frames(&network, 0, 1, 2, 1);
    assert_received(&network, 2, 3); /* no pause, no tokens */
    network.events.now_ps += 3 * US / 2;
    assert_int_equal(shoal_wire_lacking(&network.wire), US);
    send_frames(&network, 0, 1, 3, 2);
    uint64_t us;
    assert_int_equal(receive_next(&network, &us), 3);
    assert_int_equal(network.events.now_ps, 5 * US); /* one and a half are there, half a token is waited for */
    network_close(&network);
}

static void wire_is_never_faster_than_the_line(void **state)
{
    struct network network;
    (void)state;
    network_open(&network, 2);
    network.model.wire_ps *= 4;
    network.model.line_ps = network.model.wire_ps / 4;
    network.model.burst_ps = 8 * US;
    for (uint16_t slot = 1; slot <= 4; slot++)
        send_frames(&network, 0, 1, slot, 1);
    assert_received(&network, 1, 2 + 1);
    assert_received(&network, 2, 2 + 2);
    assert_received(&network, 3, 2 + 4); /* a quarter of the tokens is there, and more come meanwhile */
    assert_received(&network, 4, 2 + 8);
    network_close(&network);
}

/* Two senders have tokens for two frames each, the receiver has tokens for two in total. */
static void wire_receives_through_a_bucket(void **state)
{
    struct network network;
    (void)state;
    network_open(&network, 3);
    network.model.burst_ps = 2 * US;
    send_frames(&network, 1, 0, 1, 2);
    send_frames(&network, 2, 0, 2, 2);
    assert_received(&network, 1, 2 + 1);
    assert_received(&network, 2, 2 + 2);
    network_close(&network);
}

static void events_come_by_time_then_by_order(void **state)
{
    static const uint64_t times[] = {5, 3, 9, 3, 0, 5, 3, 8};
    static const uint32_t wanted[] = {4, 1, 3, 6, 0, 5, 7, 2};
    struct shoal_events events;
    uint32_t id;
    (void)state;
    assert_int_equal(shoal_events_init(&events, SHOAL_COUNT_OF(times)), SHOAL_OK);
    for (uint32_t i = 0; i < SHOAL_COUNT_OF(times); i++)
        shoal_events_push(&events, times[i], i);
    for (size_t i = 0; i < SHOAL_COUNT_OF(times); i++) {
        assert_true(shoal_events_pop(&events, &id));
        assert_int_equal(id, wanted[i]);
        assert_int_equal(events.now_ps, times[id]);
    }
    assert_false(shoal_events_pop(&events, &id));
    shoal_events_fini(&events);
}

/* ---- Copies alone -------------------------------------------------------------------------------------------------------- */

struct engines {
    struct shoal_model model;
    struct shoal_events events;
    struct shoal_copiers copies;
};

/* A frame takes a microsecond on a link and on a switch, and so does the start of each copy. A unit is two frames. Two hosts
 * of four ranks, two below each switch; each rank has `frames` in each direction. */
static void engines_open(struct engines *engines, unsigned frames)
{
    engines->model = (struct shoal_model){.pcie_ps = (double)US / FRAME,
                                          .switch_ps = (double)US / FRAME,
                                          .nvlink_ps = (double)US / FRAME / 8,
                                          .copy_ps = US,
                                          .unit_bytes = 2 * FRAME,
                                          .frame_bytes = FRAME,
                                          .switch_ranks = 2};
    assert_int_equal(shoal_events_init(&engines->events, 8 * SHOAL_COPY_STAGES), SHOAL_OK);
    assert_int_equal(shoal_copiers_init(&engines->copies, &engines->model, 8, 4, &engines->events, 0), SHOAL_OK);
    for (int rank = 0; rank < 8; rank++) {
        *shoal_copiers_bytes(&engines->copies, rank, true) = (uint64_t)frames * FRAME;
        *shoal_copiers_bytes(&engines->copies, rank, false) = (uint64_t)frames * FRAME;
    }
}

static void engines_close(struct engines *engines)
{
    shoal_copiers_fini(&engines->copies);
    shoal_events_fini(&engines->events);
}

/* Expects that the next completed unit is that rank's, at that time. */
static void assert_copied(struct engines *engines, int rank, uint64_t us)
{
    uint32_t id;
    int copied = -1;
    while (copied < 0 && shoal_events_pop(&engines->events, &id))
        if (!shoal_copiers_run(&engines->copies, (int)id, &copied))
            copied = -1;
    assert_int_equal(copied, rank);
    assert_int_equal(engines->events.now_ps / US, us);
}

/* The directions are independent. Another unit starts only if there is room for it. The last one is short. */
static void copies_go_both_ways_at_once(void **state)
{
    struct engines engines;
    (void)state;
    engines_open(&engines, 5);
    shoal_copiers_allow(&engines.copies, 0, true, 1);
    shoal_copiers_allow(&engines.copies, 0, false, 9);
    assert_copied(&engines, 0, 3);
    assert_copied(&engines, 0, 3);
    assert_int_equal(shoal_copiers_done(&engines.copies, 0, true), 1);
    assert_copied(&engines, 0, 6); /* outward, because no more was allowed inward */
    assert_int_equal(shoal_copiers_done(&engines.copies, 0, true), 1);
    assert_false(shoal_copiers_are_over(&engines.copies, 0));
    shoal_copiers_allow(&engines.copies, 0, true, 3);
    assert_copied(&engines, 0, 8); /* outward, a frame */
    assert_copied(&engines, 0, 9);
    assert_copied(&engines, 0, 11);
    assert_true(shoal_copiers_are_over(&engines.copies, 0));
    engines_close(&engines);
}

/* Ranks 0 and 1 share a switch, rank 2 has another one of its host, rank 4 one of another host. */
static void copies_take_turns_at_a_switch(void **state)
{
    static const int ranks[] = {0, 1, 2, 4};
    struct engines engines;
    (void)state;
    engines_open(&engines, 4);
    for (size_t i = 0; i < SHOAL_COUNT_OF(ranks); i++)
        shoal_copiers_allow(&engines.copies, ranks[i], true, 1);
    assert_copied(&engines, 2, 3);
    assert_copied(&engines, 4, 3);
    assert_copied(&engines, 0, 4); /* four frames, one after the other */
    assert_copied(&engines, 1, 5);
    engines_close(&engines);
}

/* NVLink is eight times as fast and serves works in turn. Ranks 0 and 1 share a switch in each direction. */
static void copies_pass_links_in_turn(void **state)
{
    struct engines engines;
    (void)state;
    engines_open(&engines, 1);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 0, SHOAL_COPY_BETWEEN, 8 * FRAME), US);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 0, SHOAL_COPY_BETWEEN, 16 * FRAME), 3 * US);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 1, SHOAL_COPY_BETWEEN, 8 * FRAME), US);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 0, SHOAL_COPY_UP, FRAME), US);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 0, SHOAL_COPY_DOWN, FRAME), US);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 1, SHOAL_COPY_UP, FRAME), 2 * US);
    assert_int_equal(shoal_copiers_pass_link(&engines.copies, 2, SHOAL_COPY_UP, FRAME), US);
    engines_close(&engines);
}

/* ---- GPUs by hand -------------------------------------------------------------------------------------------------------- */

#define GB 1e-3 /* microseconds for a byte at 1 GB/s */

/* Leaves only PCIe's time. */
static struct shoal_simulation with_gpus(struct shoal_simulation question, double pcie_gb_s)
{
    question = without_cpu(question);
    question.rate_gbit_s = 1e6;
    question.latency_us = question.copy_us = 0;
    question.pcie_gb_s = pcie_gb_s;
    return question;
}

/* A rank alone waits for all of its input, copies, and then releases all of its output. */
static void simulate_one_gpu_copies_in_and_out(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 1, 1, 4 * MIB), 10);
    const double way_us = 4.0 * MIB * GB / 10;
    (void)state;
    assert_near(time_us(&question), 2 * way_us, 1e-4);
    question.copy_us = 7;
    assert_near(time_us(&question), 2 * (way_us + 4 * 7), 1e-4);
    question.unit_bytes = 2 * MIB;
    assert_near(time_us(&question), 2 * (way_us + 2 * 7), 1e-4);
    question.copy_us = 0;
    question.switch_gb_s = 5;
    assert_near(time_us(&question), 4 * way_us, 1e-4);
    question.switch_gb_s = 20;
    assert_near(time_us(&question), 2 * way_us, 1e-4);
    question.host_memory_gb_s = 2.5;
    assert_near(time_us(&question), (4 + 8 + 4) * way_us, 1e-4); /* written, read and written, read */
}

/* Ranks of one host that only sum and copy: n threads take an nth of the time, but no less than the host's memory allows, and
 * each needs a core. Small operations stay with one thread. */
static void simulate_threads_share_the_work_of_a_rank(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 1, 2, 64 * MIB);
    (void)state;
    question.memory_gb_s = 5;
    const double one_us = time_us(&question);
    question.threads = 1;
    assert_true(time_us(&question) == one_us);
    for (size_t threads = 2; threads <= 16; threads *= 2) {
        question.threads = threads;
        const struct shoal_simulated answer = ask(&question);
        assert_true(answer.time_us >= one_us / (double)threads);
        assert_near(answer.time_us, one_us / (double)threads, 0.02 * (double)threads); /* signals stay */
        assert_true(answer.working <= 1);
    }
    question.host_memory_gb_s = 2 * question.memory_gb_s;
    assert_near(time_us(&question), one_us, 0.02);
    question.host_memory_gb_s = 0;
    question.cores = 3; /* one for each rank */
    assert_true(time_us(&question) == one_us);
    question.cores = 4;
    assert_near(time_us(&question), one_us / 2, 0.04);
    question = question_of("allreduce", 1, 2, 4096);
    const double small_us = time_us(&question);
    question.threads = 8;
    assert_true(time_us(&question) == small_us);
}

/* While its threads sum, the rank exchanges other chunks with the other host. */
static void simulate_threads_over_hosts(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 4, 2, 64 * MIB);
    double before_us = INFINITY;
    (void)state;
    question.rate_gbit_s = 100;
    question.memory_gb_s = 5;
    for (size_t threads = 1; threads <= 8; threads *= 2) {
        question.threads = threads;
        const struct shoal_simulated answer = ask(&question);
        assert_true(answer.time_us <= before_us && answer.time_us >= answer.bound_us);
        before_us = answer.time_us;
    }
    question.every_chunk = 1;
    assert_near(time_us(&question), before_us, 0.01);
}

/* If the bytes' CPU time is the limit, n threads at the network take an nth of it, and each needs a core. If messages or the
 * wire are the limit, they change nothing. */
static void simulate_threads_share_the_bytes_of_a_rank(void **state)
{
    struct shoal_simulation question = question_of("broadcast", 2, 1, 64 * MIB);
    (void)state;
    question.rate_gbit_s = 1e6;
    question.memory_gb_s = 1e6;
    question.latency_us = question.message_us = question.signal_us = 0;
    question.stack_gb_s = 2;
    const double one_us = time_us(&question);
    assert_true(one_us >= 64.0 * MIB * GB / 2);
    question.network_threads = 1;
    assert_true(time_us(&question) == one_us);
    for (size_t threads = 2; threads <= 16; threads *= 2) {
        question.network_threads = threads;
        assert_near(time_us(&question), one_us / (double)threads, 0.05);
        assert_true(ask(&question).messaging <= 1);
    }
    question.cores = 3;
    assert_near(time_us(&question), one_us / 3, 0.05);
    question.cores = 0;
    question.stack_gb_s = 0;
    question.rate_gbit_s = 10;
    const double wire_us = time_us(&question);
    question.network_threads = 0;
    assert_true(time_us(&question) == wire_us);
}

/* Units come in while others go out: the total is one direction's time, plus filling and emptying the pipeline. */
static void simulate_large_operands_tend_to_pcie(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 1, 4, 256 * MIB), 10);
    const double way_us = 256.0 * MIB * GB / 10, unit_us = 1.0 * MIB * GB / 10;
    (void)state;
    struct shoal_simulated answer = ask(&question);
    assert_near(answer.bound_us, way_us, 1e-9);
    assert_true(answer.time_us >= way_us && answer.time_us <= way_us + 4 * unit_us);
    assert_near(answer.copying, way_us / answer.time_us, 1e-9);
    question.switch_gb_s = 10;
    question.switch_gpus = 2;
    answer = ask(&question);
    assert_near(answer.bound_us, 2 * way_us, 1e-9);
    assert_true(answer.time_us >= 2 * way_us && answer.time_us <= 2 * way_us + 10 * unit_us);
    question.switch_gpus = 0; /* all four below one switch */
    assert_near(time_us(&question), 4 * way_us, 0.03);
    question.switch_gpus = 1;
    assert_near(time_us(&question), way_us, 0.02);
}

/* A p4d: slices of an eighth leave the GPUs, and two GPUs and an adapter share a switch. On many hosts each adapter sends
 * nearly half of the vector, so 3/4 of it passes each switch in each direction: 25 MiB in 1.6 ms. The network alone would take
 * 1.05. */
static void simulate_slices_and_their_adapters_share_switches(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 4, 8, 1024 * MIB), 12);
    const double n = 1024.0 * MIB;
    (void)state;
    question.rate_gbit_s = 400;
    question.nvlink_gb_s = 160;
    assert_near(ask(&question).bound_us, 2 * 3.0 / 4 * n * GB / 50, 1e-6);
    question.switch_gb_s = 12;
    question.switch_gpus = 2;
    assert_near(ask(&question).bound_us, 2 * 3.0 / 4 * n * GB / 50, 1e-6); /* a quarter at 12 GB/s is shorter */
    question.switch_adapters = 1;
    const struct shoal_simulated answer = ask(&question);
    assert_near(answer.bound_us, (0.25 + 2 * 3.0 / 4 / 4) * n * GB / 12, 1e-4);
    assert_near(answer.time_us, answer.bound_us, 0.1);
    assert_near(answer.sent_bytes, 2 * 3.0 / 4 * n, 1e-4);
    assert_near(answer.busbw_gb_s, answer.algbw_gb_s * 2 * 31 / 32, 1e-9);
    assert_int_equal(answer.bytes, question.bytes);
}

/* Slices leave in messages of at least 32 KiB up to 128 hosts: the units are longer. If messages are what limits, twice as many
 * hosts then take as long, except that ranks meet more of them. */
static void simulate_slices_of_many_hosts_are_longer(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 32, 8, 64 * MIB), 1e4);
    (void)state;
    question.rate_gbit_s = 1e4;
    question.nvlink_gb_s = 1e4;
    question.message_us = 20;
    const struct shoal_simulated few = ask(&question);
    assert_int_equal(few.chunks, 8);
    question.hosts = 64;
    const struct shoal_simulated many = ask(&question);
    assert_int_equal(many.chunks, 4);
    assert_near(many.time_us, few.time_us, 0.2);
}

/* Each GPU reads 7/8 of the operands twice, with no other limit. On one host nothing leaves the GPUs. */
static void simulate_nvlink_alone_needs_no_host(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 1, 8, 64 * MIB), 12);
    (void)state;
    question.nvlink_gb_s = 100;
    const struct shoal_simulated answer = ask(&question);
    assert_string_equal(answer.algorithm, "peers");
    assert_near(answer.bound_us, 2 * 7.0 / 8 * 64 * MIB * GB / 100, 1e-6);
    assert_near(answer.time_us, answer.bound_us, 1e-3);
    assert_near(answer.working, 0, 1e-9);
    question.unit_bytes = 8 * MIB; /* one chunk: bringing, reducing and gathering follow each other */
    question.copy_us = 100;
    assert_near(ask(&question).time_us, answer.bound_us + 300, 1e-3);
}

/* All that the ranks read and write: each adds two halves and writes the result to both. */
static void simulate_ranks_share_memory(void **state)
{
    struct shoal_simulation question = without_cpu(question_of("allreduce", 1, 2, 64 * MIB));
    (void)state;
    question.shared = 1;
    question.host_memory_gb_s = 10;
    assert_near(time_us(&question), 4 * 64.0 * MIB * GB / 10, 0.01);
}

/* All that ranks and copies of 8 GPUs read and write. Sums borrow operands: n read and n written by the ranks of one host, and
 * n written and n read by the copies, for each rank. An all-gather stages an eighth of it instead: it reads and writes that
 * once more. */
static void simulate_sums_pass_no_staging_buffer(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 1, 8, 256 * MIB), 1e4);
    (void)state;
    question.host_memory_gb_s = 100;
    struct shoal_simulated answer = ask(&question);
    assert_string_equal(answer.algorithm, "owners-lent");
    assert_near(answer.time_us, 8 * (2 + 2) * 256.0 * MIB * GB / 100, 0.03);
    question.collective = "allgather";
    answer = ask(&question);
    assert_string_equal(answer.algorithm, "copies-staged");
    assert_near(answer.time_us, 8 * (2 + 2.0 / 8 + 1 + 1.0 / 8) * 256.0 * MIB * GB / 100, 0.03);
}

/* Rings are those of communicators, which have room for a chunk of an all-gather: each of 128 ranks then has a part of 256 KiB,
 * in rows of 8 KiB of a unit, so a ring has 33 units and two more. A chunk of an all-reduce needs 3 of them. */
static void simulate_rings_have_room_for_any_chunk(void **state)
{
    struct shoal_simulation question = with_gpus(question_of("allreduce", 16, 8, 64 * MIB), 24);
    (void)state;
    question.latency_us = 30;
    const double us = time_us(&question);
    question.ring_bytes = 19 * MIB;
    assert_near(time_us(&question), us, 1e-9);
    question.ring_bytes = 64 * MIB;
    assert_true(time_us(&question) <= us);
    question.ring_bytes = 0;
    question.settings = (const char *const[]){"SHOAL_CHUNK_BYTES=64K", NULL}; /* 4 + 3 units, for chunks of a quarter */
    const double short_us = time_us(&question);
    question.ring_bytes = 7 * MIB;
    assert_near(time_us(&question), short_us, 1e-9);
}

/* Small operands travel with the announcements, which wait for them. */
static void simulate_small_operands_pass_pcie_twice(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 2, 1, 1024);
    const double us = time_us(&question);
    (void)state;
    question.pcie_gb_s = 10;
    assert_near(time_us(&question), us + 2 * (7 + 1024 * GB / 10), 1e-6);
}

/* ---- All questions ------------------------------------------------------------------------------------------------------- */

static void simulate_ends_and_is_never_faster_than_the_wire(void **state)
{
    static const size_t hosts[] = {1, 2, 3, 5, 8}, locals[] = {1, 2, 3};
    (void)state;
    for (int kind = SHOAL_COLLECTIVE_ALLREDUCE; kind <= SHOAL_COLLECTIVE_BARRIER; kind++) {
        for (size_t i = 0; i < SHOAL_COUNT_OF(hosts) * SHOAL_COUNT_OF(locals); i++) {
            const size_t host = hosts[i / SHOAL_COUNT_OF(locals)], local = locals[i % SHOAL_COUNT_OF(locals)];
            for (size_t bytes = 96; bytes <= 9 * MIB; bytes *= 48) {
                struct shoal_simulation question = question_of(shoal_collective_traits((enum shoal_collective_type)kind)->name,
                                                               host, local, bytes + bytes / 96 * 4 % 96);
                question.shared = (int)(i % 2);
                question.burst_bytes = i % 3 == 1 ? 40000 : 0;
                question.burst_gbit_s = i % 2 ? 50 : 0;
                question.one_machine = i % 4 == 1;
                const struct shoal_simulated answer = ask(&question);
                assert_true(answer.time_us > 0 || host * local == 1);
                assert_true(answer.time_us >= answer.bound_us);
                assert_true(answer.sending <= 1 && answer.receiving <= 1);
                assert_true(answer.working >= 0 && answer.messaging >= 0 && answer.working + answer.messaging <= 1.000001);
            }
        }
    }
}

/* Units shorter and longer than chunks, rings of any length, and every collective, so with parts and roots. */
static void simulate_ends_with_gpus(void **state)
{
    static const size_t hosts[] = {1, 2, 5}, units[] = {4096, 65536 + 4, MIB, 64 * MIB};
    (void)state;
    for (int kind = SHOAL_COLLECTIVE_ALLREDUCE; kind <= SHOAL_COLLECTIVE_BARRIER; kind++) {
        for (size_t i = 0; i < SHOAL_COUNT_OF(hosts) * SHOAL_COUNT_OF(units); i++) {
            const size_t host = hosts[i % SHOAL_COUNT_OF(hosts)], local = 1 + i % 4;
            for (size_t bytes = 480; bytes <= 12 * MIB; bytes *= 27) {
                struct shoal_simulation question =
                    question_of(shoal_collective_traits((enum shoal_collective_type)kind)->name, host, local, bytes);
                question.pcie_gb_s = 12;
                question.switch_gb_s = i % 2 ? 15 : 0;
                question.switch_gpus = i % 2 ? 1 + i % 3 : 0;
                question.switch_adapters = i % 4 == 3;
                question.unit_bytes = units[i / SHOAL_COUNT_OF(hosts)];
                question.ring_bytes = i % 5 == 4 ? 3 * MIB : 0;
                question.host_memory_gb_s = i % 3 ? 30 : 0;
                const struct shoal_simulated answer = ask(&question);
                assert_true(answer.time_us >= answer.bound_us);
                assert_true(answer.copying >= 0 && answer.copying <= 1);
            }
        }
    }
}

static void simulate_runs_every_entry(void **state)
{
    const struct shoal_algorithm *entry;
    char override[128];
    const char *const settings[] = {override, NULL};
    (void)state;
    for (int i = 0; (entry = shoal_select_entry(i)) != NULL; i++) {
        const struct shoal_collective_traits *kind = shoal_collective_traits(entry->collective);
        struct shoal_simulation question =
            question_of(kind->name, entry->where == SHOAL_WHERE_ONE_HOST ? 1 : 9, 2, entry->build ? MIB : 256);
        if (entry->collective > SHOAL_COLLECTIVE_ALLTOALL || strcmp(entry->name, "peers") == 0) /* devices run its steps */
            continue;
        question.hosts = entry->build ? question.hosts : 4;
        snprintf(override, sizeof override, "SHOAL_ALGORITHMS=%s=%s", kind->name, entry->name);
        question.settings = settings;
        const struct shoal_simulated answer = ask(&question);
        assert_int_equal(strncmp(answer.algorithm, entry->name, strlen(entry->name)), 0);
        assert_true(answer.time_us > 0);
    }
}

/* One element more than a chunk holds adds the start of another chunk, not a whole chunk's time. */
static void simulate_knows_that_the_last_chunk_is_short(void **state)
{
    struct shoal_simulation question = question_of("broadcast", 2, 1, MIB / 16);
    (void)state;
    question.rate_gbit_s = 0.1;
    while (ask(&question).chunks < 2)
        question.bytes += 64;
    const double long_us = time_us(&question);
    question.bytes = 2 * (question.bytes - 64);
    const struct shoal_simulated two = ask(&question);
    assert_int_equal(two.chunks, 2);
    assert_true(long_us < 0.6 * two.time_us);
}

static void simulate_says_the_same_again(void **state)
{
    const struct shoal_simulation question = question_of("allreduce", 5, 3, 7 * MIB);
    (void)state;
    const struct shoal_simulated one = ask(&question), other = ask(&question);
    assert_memory_equal(&one, &other, sizeof one);
}

/* ---- Directions ---------------------------------------------------------------------------------------------------------- */

static void simulate_parameters_count_in_their_direction(void **state)
{
    const struct shoal_simulation usual = question_of("allreduce", 4, 4, 32 * MIB);
    const double us = time_us(&usual);
    (void)state;
    for (size_t i = 0; i < 8; i++) {
        struct shoal_simulation worse = usual;
        worse.rate_gbit_s /= i == 0 ? 10 : 1;
        worse.latency_us *= i == 1 ? 50 : 1;
        worse.message_us *= i == 2 ? 20 : 1;
        worse.memory_gb_s /= i == 3 ? 2 : 1;
        worse.signal_us *= i == 4 ? 100 : 1;
        worse.stack_gb_s = i == 5 ? 1 : 0;
        worse.cores = i == 6 ? 2 : 0;
        worse.header_bytes *= i == 7 ? 4096 : 1;
        if (!(time_us(&worse) > us * 1.01))
            fail_msg("parameter %zu: %g us, not more than %g", i, time_us(&worse), us);
    }
}

static void simulate_gpus_count_in_their_direction(void **state)
{
    struct shoal_simulation usual = question_of("allreduce", 4, 4, 32 * MIB);
    (void)state;
    usual.rate_gbit_s = 400;
    usual.memory_gb_s = 100;
    assert_true(usual.pcie_gb_s == 0);
    const double plain_us = time_us(&usual);
    usual.pcie_gb_s = 12;
    const double us = time_us(&usual);
    assert_true(us > 1.01 * plain_us);
    for (size_t i = 0; i < 6; i++) {
        struct shoal_simulation worse = usual;
        worse.pcie_gb_s /= i == 0 ? 2 : 1;
        worse.switch_gb_s = i == 1 || i == 2 ? 12 : 0;
        worse.switch_gpus = i == 2 ? 2 : 0;
        worse.host_memory_gb_s = i == 3 ? 50 : 0;
        worse.copy_us *= i == 4 ? 20 : 1;
        worse.unit_bytes = i == 5 ? 32 * MIB : MIB; /* nothing overlaps */
        if (!(time_us(&worse) > us * 1.01))
            fail_msg("parameter %zu: %g us, not more than %g", i, time_us(&worse), us);
    }
    usual.nvlink_gb_s = 160;
    const double slices_us = time_us(&usual);
    assert_true(slices_us < us);
    usual.nvlink_gb_s = 2;
    assert_true(time_us(&usual) > slices_us * 1.01);
    usual.switch_gb_s = 12;
    const double below_us = time_us(&usual);
    usual.switch_adapters = 1;
    assert_true(time_us(&usual) >= below_us);
}

static void simulate_more_bytes_on_gpus_take_longer(void **state)
{
    double before[2] = {0, 0};
    (void)state;
    for (size_t bytes = 64; bytes <= 256 * MIB; bytes *= 4) {
        struct shoal_simulation question = question_of("allreduce", 4, 8, bytes);
        question.pcie_gb_s = 12;
        for (int i = 0; i < 2; i++) {
            const double us = time_us(&question);
            assert_true(us >= before[i]);
            before[i] = us;
            question.nvlink_gb_s = 160;
        }
    }
}

static void simulate_more_bytes_take_longer(void **state)
{
    double before = 0;
    (void)state;
    for (size_t bytes = 64; bytes <= 256 * MIB; bytes *= 4) {
        const struct shoal_simulation question = question_of("allreduce", 4, 8, bytes);
        const double us = time_us(&question);
        assert_true(us >= before);
        before = us;
    }
}

static void simulate_ranks_share_cores(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 1, 8, 64 * MIB);
    const double us = time_us(&question);
    (void)state;
    question.cores = 8;
    assert_near(time_us(&question), us, 1e-12);
    question.cores = 4;
    assert_near(time_us(&question), 2 * us, 0.02);
    question.cores = 1;
    assert_near(time_us(&question), 8 * us, 0.02);
}

/* ---- Chunks that were not simulated -------------------------------------------------------------------------------------- */

static void assert_settles(struct shoal_simulation question)
{
    const struct shoal_simulated some = ask(&question);
    question.every_chunk = 1;
    const struct shoal_simulated all = ask(&question);
    if (!(some.chunks_simulated < some.chunks && some.chunk_us > 0))
        fail_msg("%s on %zu hosts has not settled after %zu chunks", question.collective, question.hosts,
                 some.chunks_simulated);
    assert_true(all.chunks_simulated == all.chunks && all.chunk_us == 0);
    assert_int_equal(some.chunks, all.chunks);
    assert_near(some.time_us, all.time_us, 0.005);
    assert_near(some.sent_bytes, all.sent_bytes, 0);
}

/* While buckets empty, chunks follow each other steadily at the burst's rate, but not for ever. */
static void simulate_waits_until_buckets_are_empty(void **state)
{
    static const char *const collectives[] = {"allreduce", "broadcast", "allgather"};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(collectives); i++) {
        struct shoal_simulation question = question_of(collectives[i], 4, 2, 200 * MIB);
        question.rate_gbit_s = 1;
        question.burst_gbit_s = 5;
        question.burst_bytes = 40 * MIB;
        assert_settles(question);
        question.burst_gbit_s = 1.1; /* so that the buckets empty slowly */
        question.burst_bytes = 8 * MIB;
        assert_settles(question);
    }
}

static void simulate_goes_on_as_it_began(void **state)
{
    static const char *const collectives[] = {"allreduce", "broadcast", "reducescatter", "allgather", "alltoall", "gather"};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(collectives); i++) {
        assert_settles(question_of(collectives[i], 4, 2, 200 * MIB + 4 * 12345));
        struct shoal_simulation slow = question_of(collectives[i], 3, 4, 150 * MIB);
        slow.rate_gbit_s = 1;
        assert_settles(slow);
        slow.rate_gbit_s = 100;
        slow.cores = 2;
        assert_settles(slow);
    }
}

static void simulate_goes_on_as_it_began_with_gpus(void **state)
{
    static const char *const collectives[] = {"allreduce", "broadcast", "reducescatter", "allgather"};
    static const size_t units[] = {MIB / 4, MIB, 3 * MIB};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(collectives); i++) {
        struct shoal_simulation question = question_of(collectives[i], 3, 2, 200 * MIB + 6 * 12344);
        question.rate_gbit_s = 100;
        question.pcie_gb_s = 12;
        for (size_t unit = 0; unit < SHOAL_COUNT_OF(units); unit++) {
            question.unit_bytes = units[unit];
            assert_settles(question);
        }
        question.switch_gb_s = 12;
        question.switch_adapters = 1;
        question.host_memory_gb_s = 60;
        assert_settles(question);
    }
    struct shoal_simulation slices = question_of("allreduce", 4, 8, 2048 * MIB);
    slices.pcie_gb_s = 12;
    slices.nvlink_gb_s = 160;
    slices.rate_gbit_s = 400;
    assert_settles(slices);
}

/* ---- Questions of another version ---------------------------------------------------------------------------------------- */

/* A program that was built before buckets existed passes a shorter question without them. */
static void simulate_takes_a_shorter_question(void **state)
{
    struct shoal_simulation question = question_of("allreduce", 3, 2, MIB);
    const double us = time_us(&question);
    (void)state;
    question.struct_bytes = offsetof(struct shoal_simulation, burst_bytes);
    memset((char *)&question + question.struct_bytes, 0xff, sizeof question - question.struct_bytes);
    assert_near(time_us(&question), us, 0);
    question.struct_bytes--;
    struct shoal_simulated answer = SHOAL_SIMULATED_INIT;
    assert_int_equal(shoal_simulate(&question, NULL, &answer), SHOAL_ERR_ARGUMENT);
}

/* A program that was built before GPUs existed has no room for their results. */
static void simulate_fills_a_shorter_answer(void **state)
{
    const struct shoal_simulation question = question_of("allreduce", 3, 2, MIB);
    struct shoal_simulated answer = SHOAL_SIMULATED_INIT;
    (void)state;
    answer.struct_bytes = offsetof(struct shoal_simulated, copying);
    answer.copying = 17;
    assert_int_equal(shoal_simulate(&question, NULL, &answer), SHOAL_OK);
    assert_near(answer.time_us, time_us(&question), 0);
    assert_true(answer.copying == 17 && answer.struct_bytes == offsetof(struct shoal_simulated, copying));
    answer.struct_bytes--;
    assert_int_equal(shoal_simulate(&question, NULL, &answer), SHOAL_ERR_ARGUMENT);
}

/* ---- Invalid questions --------------------------------------------------------------------------------------------------- */

static void assert_refused(const struct shoal_simulation *question, const char *wanted)
{
    struct shoal_simulated answer = SHOAL_SIMULATED_INIT, untouched = SHOAL_SIMULATED_INIT;
    char reason[700] = "";
    FILE *out = fmemopen(reason, sizeof reason, "w");
    assert_non_null(out);
    assert_int_equal(shoal_simulate(question, out, &answer), SHOAL_ERR_ARGUMENT);
    fclose(out);
    assert_string_equal(reason, wanted);
    assert_memory_equal(&answer, &untouched, sizeof answer);
    assert_int_equal(shoal_simulate(question, NULL, &answer), SHOAL_ERR_ARGUMENT);
}

static void simulate_refuses_with_one_line(void **state)
{
    const struct shoal_simulation usual = question_of("allreduce", 2, 2, 4096);
    struct shoal_simulation question = usual;
    (void)state;
    assert_refused(NULL, "the question is NULL, or its struct_bytes is not set: use SHOAL_SIMULATION_INIT\n");
    question.struct_bytes = 0;
    assert_refused(&question, "the question is NULL, or its struct_bytes is not set: use SHOAL_SIMULATION_INIT\n");
    assert_int_equal(shoal_simulate(&usual, NULL, NULL), SHOAL_ERR_ARGUMENT);
    question = question_of("all", 2, 2, 4096);
    assert_refused(&question, "there is no collective \"all\"; there are all-reduce, reduce, reduce-scatter, broadcast, "
                              "all-gather, gather, scatter, all-to-all, barrier\n");
    question = question_of("allreduce", 64, 65, 4096);
    assert_refused(&question, "64 hosts of 65 ranks are more than 4096 ranks\n");
    question = question_of("allreduce", 0, 2, 4096);
    assert_refused(&question, "hosts is 0, but may be 1 to 4096\n");
    question = question_of("allreduce", 2, SIZE_MAX, 4096);
    assert_refused(&question, "ranks_per_host is 1.844674407e+19, but may be 1 to 4096\n");
    question = question_of("allreduce", 2, 2, 4095);
    assert_refused(&question, "bytes is 4095, which is not a whole number of elements\n");
    question = question_of("allgather", 2, 2, 12);
    assert_refused(&question, "bytes is 12, less than one element for each of 4 ranks\n");
}

static void simulate_refuses_models_that_make_no_sense(void **state)
{
    const struct shoal_simulation usual = question_of("allreduce", 2, 2, 4096);
    static const char *const settings[] = {"SHOAL_DEPTH=99", NULL};
    struct shoal_simulation question = usual;
    (void)state;
    question.rate_gbit_s = NAN;
    assert_refused(&question, "rate_gbit_s is nan, but may be 0.01 to 1000000\n");
    question = usual;
    question.latency_us = -1;
    assert_refused(&question, "latency_us is -1, but may be 0 to 10000000\n");
    question = usual;
    question.memory_gb_s = 0;
    assert_refused(&question, "memory_gb_s is 0, but may be 0.01 to 1000000\n");
    question = usual;
    question.stack_gb_s = INFINITY;
    assert_refused(&question, "stack_gb_s is inf, but may be 0.01 to 1000000, or 0\n");
    question = usual;
    question.frame_bytes = 0;
    assert_refused(&question, "frame_bytes is 0, but may be 64 to 1073741824\n");
    question = usual;
    question.burst_bytes = (size_t)1 << 41;
    assert_refused(&question, "burst_bytes is 2.199023256e+12, but may be 1 to 1.099511628e+12, or 0\n");
    question = usual;
    question.burst_gbit_s = 24;
    assert_refused(&question, "burst_gbit_s is 24, but may be 25 to 1000000, or 0\n");
    question = usual;
    question.pause_us = NAN;
    assert_refused(&question, "pause_us is nan, but may be 0 to 10000000\n");
    question = usual;
    question.settings = settings;
    assert_refused(&question, "SHOAL_DEPTH is 99, but may be 1 to 16\n");
}

static void simulate_refuses_gpus_that_make_no_sense(void **state)
{
    struct shoal_simulation usual = question_of("allreduce", 2, 8, 4096), question = usual;
    (void)state;
    question.pcie_gb_s = -1;
    assert_refused(&question, "pcie_gb_s is -1, but may be 0.01 to 1000000, or 0\n");
    question = usual;
    question.nvlink_gb_s = 160;
    assert_refused(&question, "switch_gb_s and nvlink_gb_s are about GPUs: set pcie_gb_s also\n");
    usual.pcie_gb_s = 12;
    question = usual;
    question.unit_bytes = 0;
    assert_refused(&question, "unit_bytes is 0, but may be 4096 to 1073741824\n");
    question = usual;
    question.ring_bytes = 7;
    assert_refused(&question, "ring_bytes is 7, but may be 4096 to 1.099511628e+12, or 0\n");
    question = usual;
    question.copy_us = NAN;
    assert_refused(&question, "copy_us is nan, but may be 0 to 10000000\n");
    question = usual;
    question.threads = 65;
    assert_refused(&question, "threads is 65, but may be 1 to 64, or 0\n");
    question = usual;
    question.network_threads = 17;
    assert_refused(&question, "network_threads is 17, but may be 1 to 16, or 0\n");
    question = usual;
    question.host_memory_gb_s = INFINITY;
    assert_refused(&question, "host_memory_gb_s is inf, but may be 0.01 to 1000000, or 0\n");
    question = usual;
    question.switch_gpus = 2;
    assert_refused(&question, "switch_gpus and switch_adapters need switch_gb_s\n");
    question = usual;
    question.shared = 1;
    assert_refused(&question, "shared is set, but ranks of a host cannot map operands on GPUs\n");
    question = usual;
    question.nvlink_gb_s = 160;
    question.collective = "broadcast";
    assert_refused(&question, "nvlink_gb_s is given, but only all-reduces go over NVLink\n");
    question.collective = "allreduce";
    question.ranks_per_host = 9;
    assert_refused(&question, "ranks_per_host is 9, but with nvlink_gb_s at most 8 GPUs of a host sum\n");
}

static void simulate_survives_every_failed_allocation(void **state)
{
    static const char *const settings[] = {"SHOAL_ALGORITHMS=all-reduce=ring,reduce=mesh", NULL};
    struct shoal_simulation question = question_of("allreduce", 3, 2, MIB);
    struct shoal_simulated answer = SHOAL_SIMULATED_INIT;
    const long live = alloc_live;
    enum shoal_status status = SHOAL_ERR_MEMORY;
    (void)state;
    question.settings = settings;
    for (long limit = 0; status != SHOAL_OK; limit++) {
        alloc_left = limit;
        status = shoal_simulate(&question, NULL, &answer);
        alloc_left = LONG_MAX;
        assert_int_equal(alloc_live, live);
        assert_true(status == SHOAL_OK || status == SHOAL_ERR_MEMORY);
        assert_true(limit < 100000);
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(events_come_by_time_then_by_order),
    cmocka_unit_test(wire_hosts_take_turns_and_each_has_its_order),
    cmocka_unit_test(wire_receives_one_after_the_other),
    cmocka_unit_test(wire_sends_at_once_what_finds_tokens),
    cmocka_unit_test(wire_tokens_come_at_the_rate),
    cmocka_unit_test(wire_is_never_faster_than_the_line),
    cmocka_unit_test(wire_receives_through_a_bucket),
    cmocka_unit_test(copies_go_both_ways_at_once),
    cmocka_unit_test(copies_take_turns_at_a_switch),
    cmocka_unit_test(copies_pass_links_in_turn),
    cmocka_unit_test(simulate_one_gpu_copies_in_and_out),
    cmocka_unit_test(simulate_large_operands_tend_to_pcie),
    cmocka_unit_test(simulate_slices_and_their_adapters_share_switches),
    cmocka_unit_test(simulate_slices_of_many_hosts_are_longer),
    cmocka_unit_test(simulate_nvlink_alone_needs_no_host),
    cmocka_unit_test(simulate_ranks_share_memory),
    cmocka_unit_test(simulate_sums_pass_no_staging_buffer),
    cmocka_unit_test(simulate_rings_have_room_for_any_chunk),
    cmocka_unit_test(simulate_small_operands_pass_pcie_twice),
    cmocka_unit_test(simulate_ends_with_gpus),
    cmocka_unit_test(simulate_gpus_count_in_their_direction),
    cmocka_unit_test(simulate_more_bytes_on_gpus_take_longer),
    cmocka_unit_test(simulate_goes_on_as_it_began_with_gpus),
    cmocka_unit_test(simulate_fills_a_shorter_answer),
    cmocka_unit_test(simulate_refuses_gpus_that_make_no_sense),
    cmocka_unit_test(simulate_one_message_takes_the_sum_of_its_parts),
    cmocka_unit_test(simulate_a_burst_does_not_wait_for_the_rate),
    cmocka_unit_test(simulate_a_burst_is_gained_once),
    cmocka_unit_test(simulate_hosts_on_one_machine_share_its_cores),
    cmocka_unit_test(simulate_inside_a_host_memory_counts),
    cmocka_unit_test(simulate_crossings_add_up),
    cmocka_unit_test(simulate_large_vectors_tend_to_the_wire),
    cmocka_unit_test(simulate_counts_what_is_sent),
    cmocka_unit_test(simulate_ends_and_is_never_faster_than_the_wire),
    cmocka_unit_test(simulate_runs_every_entry),
    cmocka_unit_test(simulate_knows_that_the_last_chunk_is_short),
    cmocka_unit_test(simulate_says_the_same_again),
    cmocka_unit_test(simulate_parameters_count_in_their_direction),
    cmocka_unit_test(simulate_more_bytes_take_longer),
    cmocka_unit_test(simulate_ranks_share_cores),
    cmocka_unit_test(simulate_goes_on_as_it_began),
    cmocka_unit_test(simulate_waits_until_buckets_are_empty),
    cmocka_unit_test(simulate_threads_share_the_work_of_a_rank),
    cmocka_unit_test(simulate_threads_over_hosts),
    cmocka_unit_test(simulate_threads_share_the_bytes_of_a_rank),
    cmocka_unit_test(simulate_takes_a_shorter_question),
    cmocka_unit_test(simulate_refuses_with_one_line),
    cmocka_unit_test(simulate_refuses_models_that_make_no_sense),
    cmocka_unit_test(simulate_survives_every_failed_allocation),
};

int main(void)
{
    return cmocka_run_group_tests_name("simulate", tests, NULL, NULL);
}
