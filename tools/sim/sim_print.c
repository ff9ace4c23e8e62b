/* Prints the results of `shoal sim`. */
#include "sim.h"

#include <string.h>

#include "base/json_text.h"
#include "tool.h"

const char *sim_size_print(double bytes, char text_out[24])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++)
        bytes /= 1024;
    snprintf(text_out, 24, bytes == (double)(long)bytes ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
    return text_out;
}

static double share_of_bound(const struct shoal_simulated *answer)
{
    return answer->time_us > 0 ? answer->bound_us / answer->time_us : 0;
}

static void gpus_print(const struct shoal_simulation *model)
{
    char unit[24], ring[24], gpus[32] = "all of a host", below[96] = "no switch is a limit", memory[64] = "";
    if (model->switch_gpus)
        snprintf(gpus, sizeof gpus, "%zu GPUs", model->switch_gpus);
    if (model->switch_gb_s > 0)
        snprintf(below, sizeof below, "switches %g GB/s each way for %s%s", model->switch_gb_s, gpus,
                 model->switch_adapters ? " and their adapters" : "");
    if (model->host_memory_gb_s > 0)
        snprintf(memory, sizeof memory, "; memory of a host %g GB/s in all", model->host_memory_gb_s);
    if (model->pcie_gb_s > 0)
        printf("#   GPUs: PCIe %g GB/s each way, %s,\n#   units of %s, ring of %s, %g us before a copy", model->pcie_gb_s,
               below, sim_size_print((double)model->unit_bytes, unit),
               model->ring_bytes ? sim_size_print((double)model->ring_bytes, ring) : "the usual size", model->copy_us);
    if (model->nvlink_gb_s > 0)
        printf("; NVLink %g GB/s each way", model->nvlink_gb_s);
    if (model->pcie_gb_s > 0 || *memory)
        printf("%s%s\n", model->pcie_gb_s > 0 ? "" : "#   ", model->pcie_gb_s > 0 ? memory : memory + 2);
}

void sim_parameters_print(const struct shoal_simulation *model)
{
    char frame[24], burst[24], cores[48] = "a core for each rank", stack[64] = "bytes cost no CPU time";
    if (model->cores)
        snprintf(cores, sizeof cores, "%zu core%s %s", model->cores, model->cores == 1 ? "" : "s",
                 model->one_machine ? "for all hosts" : "per host");
    if (model->stack_gb_s > 0)
        snprintf(stack, sizeof stack, "bytes go through a core at %g GB/s", model->stack_gb_s);
    printf("# model: network %g Gbit/s each way per host, latency %g us, %g us CPU per message and side, %s,\n"
           "#   %zu header bytes, frames of %s; memory %g GB/s read and written per rank, signal %g us, %s\n",
           model->rate_gbit_s, model->latency_us, model->message_us, stack, model->header_bytes,
           sim_size_print((double)model->frame_bytes, frame), model->memory_gb_s, model->signal_us, cores);
    if (model->threads > 1)
        printf("#   %zu threads of each rank sum and copy, each at that rate\n", model->threads);
    if (model->network_threads > 1)
        printf("#   %zu threads of each rank send and receive, each on a core\n", model->network_threads);
    if (model->burst_bytes && model->burst_gbit_s > 0)
        printf("#   after a pause %s go at %g Gbit/s\n", sim_size_print((double)model->burst_bytes, burst),
               model->burst_gbit_s);
    else if (model->burst_bytes)
        printf("#   after a pause %s go in no time\n", sim_size_print((double)model->burst_bytes, burst));
    gpus_print(model);
}

void sim_header_print(const struct sim_options *options)
{
    const struct shoal_simulation *question = &options->question;
    if (options->format == SIM_CSV)
        puts("collective,hosts,ranks,bytes,dtype,operands,algorithm,time_us,algbw_gb_s,busbw_gb_s,bound_us,share_of_bound,"
             "sent_bytes,received_bytes,sending,receiving,working,messaging,waiting,copying,chunks,chunks_simulated,chunk_us,"
             "rate_gbit_s,latency_us,message_us,stack_gb_s,memory_gb_s,signal_us,header_bytes,frame_bytes,cores,"
             "burst_bytes,burst_gbit_s,pause_us,one_machine," SIM_GPU_FIELDS);
    if (options->format != SIM_TABLE)
        return;
    printf("# shoal %s, %s predicted, %zu rank%s per host, %s, %s operands\n", shoal_version(), question->collective,
           question->ranks_per_host, question->ranks_per_host == 1 ? "" : "s", tool_type_name(question->type),
           question->shared ? "shared" : "plain");
    sim_parameters_print(question);
    puts("# of bound: the time that the wire (or the path to GPUs) needs by itself, over the time; sent: payload per host;\n"
         "#   sending: share of the busiest adapter's time; working, messaging, waiting: shares of the ranks' time;\n"
         "#   copying: share of the time of the busiest path to GPUs; chunks: simulated / all; GB = 10^9");
    printf("%6s %6s %10s %14s %8s %8s %8s %10s %8s %8s %9s %8s%s %11s  algorithm\n", "hosts", "ranks", "size", "time us",
           "algbw", "busbw", "of bound", "sent", "sending", "working", "messaging", "waiting",
           question->pcie_gb_s > 0 ? "  copying" : "", "chunks");
    fflush(stdout);
}

static void table_print(const struct sim_options *options, const struct sim_row *row)
{
    const struct shoal_simulated *answer = &row->answer;
    char size[24], sent[24], bound[16] = "-", chunks[48], copying[16] = "";
    if (answer->bound_us > 0)
        snprintf(bound, sizeof bound, "%.1f%%", 100 * share_of_bound(answer));
    if (options->question.pcie_gb_s > 0)
        snprintf(copying, sizeof copying, " %7.1f%%", 100 * answer->copying);
    snprintf(chunks, sizeof chunks, "%zu/%zu", answer->chunks_simulated, answer->chunks);
    printf("%6zu %6zu %10s %14.2f %8.3f %8.3f %8s %10s %7.1f%% %7.1f%% %8.1f%% %7.1f%%%s %11s  %s\n", row->hosts,
           row->hosts * options->question.ranks_per_host, sim_size_print((double)answer->bytes, size), answer->time_us,
           answer->algbw_gb_s, answer->busbw_gb_s, bound, sim_size_print(answer->sent_bytes, sent), 100 * answer->sending,
           100 * answer->working, 100 * answer->messaging, 100 * answer->waiting, copying, chunks, answer->algorithm);
}

/* Quotes text as spreadsheets expect. */
static void csv_text_print(const char *text)
{
    const bool is_quoted = text[strcspn(text, ",\"\n")];
    if (is_quoted)
        putchar('"');
    for (; *text; text++)
        fputs(*text == '"' ? "\"\"" : (const char[]){*text, 0}, stdout);
    if (is_quoted)
        putchar('"');
}

void sim_fields_print(const struct sim_field *fields, size_t count, bool is_json)
{
    for (size_t i = 0; i < count; i++) {
        fputs(i ? "," : is_json ? "{" : "", stdout);
        if (is_json)
            printf("\"%s\":", fields[i].name);
        if (fields[i].text && is_json)
            shoal_json_print_text(stdout, fields[i].text);
        else if (fields[i].text)
            csv_text_print(fields[i].text);
        else
            printf("%.12g", fields[i].number);
    }
    puts(is_json ? "}" : "");
}

size_t sim_model_fields(const struct shoal_simulation *model, size_t hosts, struct sim_field *fields_out)
{
    const struct sim_field fields[] = {
        {"rate_gbit_s", NULL, model->rate_gbit_s},
        {"latency_us", NULL, model->latency_us},
        {"message_us", NULL, model->message_us},
        {"stack_gb_s", NULL, model->stack_gb_s},
        {"memory_gb_s", NULL, model->memory_gb_s},
        {"signal_us", NULL, model->signal_us},
        {"header_bytes", NULL, (double)model->header_bytes},
        {"frame_bytes", NULL, (double)model->frame_bytes},
        {"cores", NULL, (double)(model->cores ? model->cores : model->ranks_per_host * (model->one_machine ? hosts : 1))},
        {"burst_bytes", NULL, (double)model->burst_bytes},
        {"burst_gbit_s", NULL, model->burst_gbit_s},
        {"pause_us", NULL, model->pause_us},
        {"one_machine", NULL, model->one_machine},
        {"pcie_gb_s", NULL, model->pcie_gb_s},
        {"switch_gb_s", NULL, model->switch_gb_s},
        {"switch_gpus", NULL, (double)model->switch_gpus},
        {"switch_adapters", NULL, model->switch_adapters},
        {"nvlink_gb_s", NULL, model->nvlink_gb_s},
        {"unit_bytes", NULL, (double)model->unit_bytes},
        {"ring_bytes", NULL, (double)model->ring_bytes},
        {"copy_us", NULL, model->copy_us},
        {"host_memory_gb_s", NULL, model->host_memory_gb_s},
        {"threads", NULL, (double)(model->threads ? model->threads : 1)},
        {"network_threads", NULL, (double)(model->network_threads ? model->network_threads : 1)},
    };
    memcpy(fields_out, fields, sizeof fields);
    return sizeof fields / sizeof fields[0];
}

enum { RESULT_FIELDS = 23 };

static void record_print(const struct sim_options *options, const struct sim_row *row)
{
    const struct shoal_simulation *model = &options->question;
    const struct shoal_simulated *answer = &row->answer;
    struct sim_field fields[RESULT_FIELDS + SIM_MODEL_FIELDS_MAX] = {
        {"collective", model->collective, 0},
        {"hosts", NULL, (double)row->hosts},
        {"ranks", NULL, (double)(row->hosts * model->ranks_per_host)},
        {"bytes", NULL, (double)answer->bytes},
        {"dtype", tool_type_name(model->type), 0},
        {"operands", model->shared ? "shared" : "plain", 0},
        {"algorithm", answer->algorithm, 0},
        {"time_us", NULL, answer->time_us},
        {"algbw_gb_s", NULL, answer->algbw_gb_s},
        {"busbw_gb_s", NULL, answer->busbw_gb_s},
        {"bound_us", NULL, answer->bound_us},
        {"share_of_bound", NULL, share_of_bound(answer)},
        {"sent_bytes", NULL, answer->sent_bytes},
        {"received_bytes", NULL, answer->received_bytes},
        {"sending", NULL, answer->sending},
        {"receiving", NULL, answer->receiving},
        {"working", NULL, answer->working},
        {"messaging", NULL, answer->messaging},
        {"waiting", NULL, answer->waiting},
        {"copying", NULL, answer->copying},
        {"chunks", NULL, (double)answer->chunks},
        {"chunks_simulated", NULL, (double)answer->chunks_simulated},
        {"chunk_us", NULL, answer->chunk_us},
    };
    const size_t count = RESULT_FIELDS + sim_model_fields(model, row->hosts, fields + RESULT_FIELDS);
    sim_fields_print(fields, count, options->format == SIM_JSON);
}

void sim_row_print(const struct sim_options *options, const struct sim_row *row)
{
    if (options->format == SIM_TABLE)
        table_print(options, row);
    else
        record_print(options, row);
    fflush(stdout);
}

/* ---- The model ----------------------------------------------------------------------------------------------------------- */

/* Through an adapter that sends continuously: its bucket is empty. */
static double wire_us(const struct shoal_simulation *model, double bytes)
{
    return (bytes + (double)model->header_bytes) * 8e-3 / model->rate_gbit_s;
}

/* After a pause: the bucket is full. */
static double first_wire_us(const struct shoal_simulation *model, double bytes)
{
    const double sent = bytes + (double)model->header_bytes, shaped = sent - (double)model->burst_bytes;
    const double line_us = model->burst_gbit_s > 0 ? sent * 8e-3 / model->burst_gbit_s : 0;
    const double shaped_us = shaped > 0 ? shaped * 8e-3 / model->rate_gbit_s : 0;
    return shaped_us > line_us ? shaped_us : line_us;
}

static double stack_us(const struct shoal_simulation *model, double bytes)
{
    const double threads = model->network_threads ? (double)model->network_threads : 1;
    return model->message_us + (model->stack_gb_s > 0 ? bytes * 1e-3 / (threads * model->stack_gb_s) : 0);
}

double sim_message_us(const struct shoal_simulation *model, double bytes)
{
    const double sent_us = model->burst_bytes ? first_wire_us(model, bytes) : wire_us(model, bytes);
    return stack_us(model, bytes) + sent_us + model->latency_us + stack_us(model, bytes);
}

/* In a stream, messages follow each other at the rate of the slower of core and wire. */
static double stream_gb_s(const struct shoal_simulation *model, double bytes)
{
    const double core = stack_us(model, bytes), wire = wire_us(model, bytes);
    return bytes * 1e-3 / (core > wire ? core : wire);
}

static void network_print(const struct shoal_simulation *model)
{
    static const double sizes[] = {8, 4096, 65536, 1 << 20};
    char size[24];
    puts("What the model predicts for things that can be measured. If a measurement differs, set the option named there.\n");
    puts("One message from a rank to a rank of another host, from the call until it is received (half a round trip):");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        printf("    %8s %12.2f us\n", sim_size_print(sizes[i], size), sim_message_us(model, sizes[i]));
    printf("  = --message-us %g twice + --latency %gus + (bytes + --header %zu) over --rate %ggbit; and through --stack\n",
           model->message_us, model->latency_us, model->header_bytes, model->rate_gbit_s);
    if (model->burst_bytes)
        printf("    after a pause, so that only the bytes beyond --burst %zu go at that rate\n", model->burst_bytes);
    puts("");
    puts("A stream of messages from one rank to another, with many under way (measure with iperf3, or the provider's fi_bw):");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        printf("    %8s %12.4f GB/s\n", sim_size_print(sizes[i], size), stream_gb_s(model, sizes[i]));
    puts("  large messages: --rate, or --stack if the core is slower; small messages: --message-us\n");
}

static void memory_print(const struct shoal_simulation *model)
{
    const double copied = (double)(64 << 20), rate = model->memory_gb_s * 1e3;
    puts("Inside a host, if all its ranks do the same at the same time:");
    printf("    memcpy of 64 MiB      %12.2f us  (2 bytes of --memory %gGB/s each: memcpy at %g GB/s)\n", 2 * copied / rate,
           model->memory_gb_s, model->memory_gb_s / 2);
    printf("    a sum of two vectors  %12.2f us  (64 MiB each, into a third: 3 bytes each)\n", 3 * copied / rate);
    printf("    a signal              %12.2f us  (--signal-us; half of what `shoal bench` calls an exchange)\n\n",
           model->signal_us);
}

void sim_model_print(const struct shoal_simulation *model)
{
    network_print(model);
    memory_print(model);
    puts("The rest of the model:\n"
         "    Ranks execute the plans that `shoal explain` prints, with the chunks and slots of the settings. All\n"
         "    ranks begin at the same moment. Each operation begins with a rank's announcement to each peer on another\n"
         "    host, and to the ranks of its host.\n"
         "    A rank does one thing at a time: it works, sends, receives or waits. With --threads, several threads\n"
         "    share its large sums and copies, while it continues with other chunks. With --network-threads, several\n"
         "    share the bytes that go through --stack. With --cores, the ranks of a host take turns on these cores.\n"
         "    With --one-machine, the ranks of all hosts do.\n"
         "    Each host has one adapter for all its ranks. With --switch-adapters it has one below each switch, with\n"
         "    its share of the rate. An adapter sends messages in the order in which they come: --frame bytes to one\n"
         "    host, then to the next. It receives as fast as it sends; what it cannot receive yet waits on the way.\n"
         "    With --burst an adapter has a token bucket in each direction, full at first. Tokens come at --rate.\n"
         "    Bytes that find a token do not wait.\n"
         "    With --host-memory, the ranks of a host and their copies share its memory. With --pcie, copy engines\n"
         "    move operands through a ring in host memory, in units of --unit bytes, in both directions independently.\n"
         "    Meanwhile ranks and network work on other units.\n"
         "    With --nvlink, GPUs sum among themselves by the plan peers: they reduce and gather over NVLink. On\n"
         "    several hosts, a slice of each GPU passes PCIe, in chunks of one --unit for each rank of a host, or of\n"
         "    what staging buffers hold.\n"
         "    Not modeled: other traffic, losses, caches, the time to sleep and to wake.\n"
         "    Once the time from chunk to chunk has settled to 0.2%, it is assumed for all further chunks, except with\n"
         "    --every-chunk.");
}
