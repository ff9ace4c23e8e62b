/* The kernels for GPUs over the stand-in driver, which runs them as functions of the host. They produce the bits of the
 * processor's kernels and of the gradient kernels, at any alignment of the arrays; they never use more than 8 blocks; errors
 * of the driver are reported. dev/check.py checks that kernels.ptx.xz is made from this source. SHOAL_TEST_CUDA names a real
 * driver, on which the bits are compared (make test-gpu). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/kernels/gpu_kernels.h"
#include "device/gpu.h"
#include "fusion/codec/gradient_kernels.h"
#include "kernels/kernel_lists.h"
#include "kernels/kernels.h"
#include "mock_cases.h"

#define SOURCES SHOAL_GPU_SOURCES_MAX
#define SMALL ((size_t)4608)   /* elements of an array's room: 4,099, shifts, and the gap between arrays */
#define LARGE ((size_t)294912) /* bytes of the same, at which each of the 4,096 threads handles several packets at once */
#define MEMORY_BYTES (3 * LARGE)

static struct shoal_log quiet;

static struct {
    struct shoal_gpu *gpu;
    struct shoal_gpu_kernels *kernels;
    shoal_cu_stream stream;
    shoal_cu_address memory; /* [MEMORY_BYTES] on the device */
    uint64_t random;
} on;

static uint64_t draw(void)
{
    on.random ^= on.random << 13;
    on.random ^= on.random >> 7;
    on.random ^= on.random << 17;
    return on.random >> 8;
}

static size_t draw_below(size_t limit)
{
    return (size_t)(draw() % limit);
}

static bool is_real(void)
{
    return getenv("SHOAL_TEST_CUDA") != NULL;
}

static void start_real(void)
{
    shoal_cu_device device;
    OK(cu.init(0));
    OK(cu.device_get(&device, 0));
    OK(cu.primary_retain(&contexts[0], device));
    OK(cu.context_set(contexts[0]));
}

/* A real driver does not count objects. */
static void expect_count(const char *what, size_t wanted)
{
    if (!is_real())
        assert_int_equal(control.count_of(what), wanted);
}

static void begin(const char *modes)
{
    if (is_real())
        start_real();
    else
        start(modes);
    memset(&on, 0, sizeof on);
    on.random = UINT64_C(0x9e3779b97f4a7c15);
    assert_int_equal(shoal_gpu_open(&quiet, &on.gpu), SHOAL_OK);
    assert_int_equal(shoal_gpu_kernels_open(on.gpu, contexts[0], &on.kernels), SHOAL_OK);
    on.stream = make_stream();
    on.memory = make_memory(MEMORY_BYTES);
}

/* All resources are returned. */
static void end(void)
{
    shoal_gpu_kernels_close(on.kernels);
    shoal_gpu_close(on.gpu);
    expect_count("modules", 0);
    expect_count("stack", 1); /* the current one */
    expect_count("operations", 0);
}

static void expect_said(enum shoal_status got, enum shoal_status wanted, const char *first, const char *second)
{
    char text[SHOAL_LOG_TEXT_MAX] = "";
    assert_int_equal(got, wanted);
    assert_int_equal(shoal_log_last_error(&quiet, text, sizeof text), wanted);
    if (!strstr(text, first) || !strstr(text, second))
        fail_msg("'%s' and '%s' are not both in: %s", first, second, text);
}

/* ---- Reductions ---------------------------------------------------------------------------------------------------------- */

static bool is_float(enum shoal_type type)
{
    return type == SHOAL_FLOAT32 || type == SHOAL_FLOAT64 || type == SHOAL_BFLOAT16 || type == SHOAL_FLOAT16;
}

/* Fills with random bits, but with ordinary numbers for most floats. */
static void fill_elements(enum shoal_type type, char *at, size_t bytes)
{
    const size_t step = is_float(type) ? shoal_type_bytes(type) : sizeof(uint64_t);
    for (size_t i = 0; i + step <= bytes; i += step) {
        uint64_t any = draw() * UINT64_C(0x100000001b3);
        const float single = (float)(int32_t)any * 1.2345e-5f;
        const double wide = (double)(int64_t)any * 1.2345e-9;
        uint32_t word;
        memcpy(&word, &single, sizeof word);
        if (type == SHOAL_FLOAT64 && any % 4)
            memcpy(&any, &wide, sizeof any);
        else if (type == SHOAL_FLOAT32 && any % 4)
            any = word;
        else if (type == SHOAL_BFLOAT16 && any % 4)
            any = word >> 16;
        memcpy(at + i, &any, step);
    }
}

static double draw_argument(enum shoal_type type, enum shoal_op op)
{
    static const double divisors[] = {1, 2, 3, 7, 64, 300}, scales[] = {1, 0, -1, 0.5, 1.0 / 3, 1e30};
    static const double wholes[] = {1, 0, -1, 3, 1000003, -9223372036854775808.0};
    if (op == SHOAL_AVG)
        return divisors[draw_below(SHOAL_COUNT_OF(divisors))];
    return is_float(type) ? scales[draw_below(SHOAL_COUNT_OF(scales))] : wholes[draw_below(SHOAL_COUNT_OF(wholes))];
}

/* A call whose arrays are in on.memory, one after the other, and the same bytes on the host. */
struct call {
    struct shoal_gpu_reduction reduction;
    size_t room; /* of an array */
    char *image; /* [MEMORY_BYTES] */
};

static size_t used_by(const struct call *call)
{
    return (size_t)(call->reduction.source_count + 1) * call->room;
}

static void *host_of(const struct call *call, uint64_t address)
{
    assert_in_range(address, on.memory, on.memory + used_by(call) - 1);
    return call->image + (address - on.memory);
}

/* Chooses offsets: the same between two packets or not, the destination in place or not. */
static void lay_out(struct call *call)
{
    struct shoal_gpu_reduction *reduction = &call->reduction;
    const size_t element = shoal_type_bytes(reduction->type), shifts = 64 / element;
    const size_t common = draw_below(16 / element) * element;
    const bool is_alike = draw_below(3) > 0 || call->room == LARGE, is_in_place = draw_below(4) == 0;
    uint64_t at[SOURCES + 1];
    for (size_t i = 0; i <= SOURCES; i++)
        at[i] = on.memory + i * call->room + (is_alike ? common + 16 * draw_below(3) : draw_below(shifts) * element);
    for (int s = 0; s < reduction->source_count; s++)
        reduction->sources[s] = at[s + 1];
    reduction->dest = at[is_in_place ? 1 + draw_below((size_t)reduction->source_count) : 0];
}

/* Only the destination changes. */
static void run_and_compare(const struct call *call)
{
    static char got[MEMORY_BYTES];
    const struct shoal_gpu_reduction *reduction = &call->reduction;
    const void *sources[SOURCES];
    void *dest = host_of(call, reduction->dest);
    fill_elements(reduction->type, call->image, used_by(call));
    OK(cu.copy_to_device(on.memory, call->image, used_by(call), on.stream));
    assert_int_equal(shoal_gpu_reduce(on.kernels, reduction, on.stream), SHOAL_OK);
    OK(cu.copy_to_host(got, on.memory, used_by(call), on.stream));
    OK(cu.stream_synchronize(on.stream));
    for (int s = 0; s < reduction->source_count; s++)
        sources[s] = host_of(call, reduction->sources[s]);
    shoal_kernels_find("baseline")
        ->reduce[reduction->type][reduction->op](&dest, 1, sources, reduction->source_count, reduction->count,
                                                 reduction->argument, SHOAL_STORES_CACHED);
    if (memcmp(got, call->image, used_by(call)) != 0)
        fail_msg("type %d, op %d, %d sources, %zu elements, argument %g: the bits differ", (int)reduction->type,
                 (int)reduction->op, reduction->source_count, reduction->count, reduction->argument);
}

/* One type and operator. */
static void reduce_in_many_ways(struct call *call)
{
    static const size_t counts[] = {0, 1, 2, 3, 15, 16, 17, 33, 255, 257, 1000, 4099};
    struct shoal_gpu_reduction *reduction = &call->reduction;
    for (int round = 0; round < 12; round++) {
        call->room = round ? SMALL * shoal_type_bytes(reduction->type) : LARGE;
        reduction->source_count = round ? 1 + (int)draw_below(SOURCES) : 2;
        reduction->count = round ? counts[draw_below(SHOAL_COUNT_OF(counts))]
                                 : (LARGE - 64) / shoal_type_bytes(reduction->type) - draw_below(20);
        reduction->argument = draw_argument(reduction->type, reduction->op);
        lay_out(call);
        run_and_compare(call);
    }
}

static void reductions_have_the_bits_of_the_processor(void **state)
{
    struct call call = {.image = malloc(MEMORY_BYTES)};
    (void)state;
    begin("");
    assert_non_null(call.image);
    for (int type = 0; type < SHOAL_TYPE_END; type++) {
        for (int op = 0; op < SHOAL_OP_END; op++) {
            call.reduction.type = (enum shoal_type)type;
            call.reduction.op = (enum shoal_op)op;
            if (shoal_kernels_find("baseline")->reduce[type][op])
                reduce_in_many_ways(&call);
        }
    }
    expect_count("blocks", SHOAL_GPU_BLOCKS_MAX);
    free(call.image);
    end();
}

/* ---- Casts --------------------------------------------------------------------------------------------------------------- */

static const enum shoal_type halves[] = {SHOAL_BFLOAT16, SHOAL_FLOAT16};

static const struct shoal_gradient_kernels *processor(void)
{
    return shoal_gradient_kernels_at(0);
}

/* Expects the same bits, or NaN on both sides: processors differ in the bits of NaN. */
static void expect_same(const float *got, const float *wanted, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (memcmp(&got[i], &wanted[i], sizeof *got) != 0 && !(isnan(got[i]) && isnan(wanted[i])))
            fail_msg("element %zu of %zu is %a, not %a", i, count, (double)got[i], (double)wanted[i]);
}

/* Every number of 16 bits. */
static void widen_all(enum shoal_type type, float factor)
{
    enum { ALL = 65536 };
    static uint16_t narrow[ALL];
    static float got[ALL], wanted[ALL];
    for (uint32_t i = 0; i < ALL; i++)
        narrow[i] = (uint16_t)i;
    const shoal_cu_address to = on.memory + ALL * 2;
    OK(cu.copy_to_device_now(on.memory, narrow, sizeof narrow));
    assert_int_equal(shoal_gpu_widen(on.kernels, type, to, on.memory, ALL, factor, on.stream), SHOAL_OK);
    OK(cu.stream_synchronize(on.stream));
    OK(cu.copy_to_host_now(got, to, sizeof got));
    (type == SHOAL_BFLOAT16 ? processor()->from_bfloat16 : processor()->from_float16)(wanted, narrow, ALL, factor);
    expect_same(got, wanted, ALL);
}

/* Fills with numbers of all magnitudes, those in the middle between two of 16 bits, and random bits. */
static void fill_floats(float *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t word = (uint32_t)draw();
        word = i % 3 == 1 ? word & 0xfffff000 : i % 3 == 2 ? (word & 0x8fffffff) | 0x30000000 : word;
        memcpy(&numbers[i], &word, sizeof word);
    }
}

static void narrow_some(enum shoal_type type, size_t count, float factor)
{
    enum { MOST = 50000 };
    static float wide[MOST + 1];
    static uint16_t got[MOST + 2], wanted[MOST];
    const shoal_cu_address from = on.memory + 4 * draw_below(8), to = on.memory + 4 * MOST + 64 + 2 * draw_below(8);
    fill_floats(wide, count);
    memset(got, 0xa5, sizeof got);
    OK(cu.copy_to_device_now(to - 2, got, (count + 2) * sizeof *got));
    OK(cu.copy_to_device_now(from, wide, (count + 1) * sizeof *wide));
    assert_int_equal(shoal_gpu_narrow(on.kernels, type, to, from, count, factor, on.stream), SHOAL_OK);
    OK(cu.stream_synchronize(on.stream));
    OK(cu.copy_to_host_now(got, to - 2, (count + 2) * sizeof *got));
    (type == SHOAL_BFLOAT16 ? processor()->to_bfloat16 : processor()->to_float16)(wanted, wide, count, factor);
    assert_memory_equal(got + 1, wanted, count * sizeof *got);
    assert_int_equal(got[0], 0xa5a5);
    assert_int_equal(got[count + 1], 0xa5a5);
}

static void casts_have_the_bits_of_the_processor(void **state)
{
    static const size_t counts[] = {0, 1, 2, 511, 4097, 50000};
    (void)state;
    for (size_t t = 0; t < 2; t++) {
        for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
            begin("");
            narrow_some(halves[t], counts[c], c % 2 ? 1 : 1 / 3.0f);
            end();
        }
        begin("");
        widen_all(halves[t], 1);
        widen_all(halves[t], 0.3f);
        expect_count("blocks", SHOAL_GPU_BLOCKS_MAX);
        end();
    }
}

/* ---- Blocks of 8 bits ---------------------------------------------------------------------------------------------------- */

#define QUANTIZED_MAX 20000
#define SCALES_MAX (QUANTIZED_MAX / SHOAL_GPU_QUANTIZED_BLOCK + 1)

/* The numbers on both sides; on the device, the offsets of the arrays in on.memory. */
struct quantized {
    float source[QUANTIZED_MAX], error[QUANTIZED_MAX], scales[SCALES_MAX];
    int8_t values[QUANTIZED_MAX];
};

static shoal_cu_address member_at(size_t offset)
{
    return on.memory + offset;
}
#define MEMBER_AT(member) member_at(offsetof(struct quantized, member))

/* Fills with ordinary numbers; some blocks have only subnormals, or a number that is not finite. */
static void fill_quantized(struct quantized *numbers)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, 0, 3e38f};
    memset(numbers, 0, sizeof *numbers);
    for (size_t i = 0; i < QUANTIZED_MAX; i++) {
        const float small = i / SHOAL_GPU_QUANTIZED_BLOCK % 5 == 4 ? 1e-45f : 1e-9f;
        numbers->source[i] = (float)(int32_t)draw() * small;
        numbers->error[i] = (float)(int32_t)draw() * small / 100;
        if (draw_below(700) == 0)
            numbers->source[i] = special[draw_below(SHOAL_COUNT_OF(special))];
    }
}

static void quantize_and_compare(size_t count, bool has_error)
{
    static struct quantized wanted, got;
    const size_t blocks = (count + SHOAL_GPU_QUANTIZED_BLOCK - 1) / SHOAL_GPU_QUANTIZED_BLOCK;
    fill_quantized(&wanted);
    OK(cu.copy_to_device_now(on.memory, &wanted, sizeof wanted));
    assert_int_equal(shoal_gpu_quantize(on.kernels, MEMBER_AT(values), MEMBER_AT(scales), MEMBER_AT(source),
                                        has_error ? MEMBER_AT(error) : 0, count, on.stream),
                     SHOAL_OK);
    OK(cu.stream_synchronize(on.stream));
    OK(cu.copy_to_host_now(&got, on.memory, sizeof got));
    processor()->quantize(wanted.values, wanted.scales, wanted.source, has_error ? wanted.error : NULL, count);
    assert_memory_equal(got.values, wanted.values, sizeof got.values);
    assert_memory_equal(got.error, wanted.error, sizeof got.error);
    expect_same(got.scales, wanted.scales, blocks);
    for (int adds = 0; adds < 2; adds++) {
        assert_int_equal(shoal_gpu_dequantize(on.kernels, MEMBER_AT(source), MEMBER_AT(values), MEMBER_AT(scales), count, 0.3f,
                                              adds, on.stream),
                         SHOAL_OK);
        OK(cu.stream_synchronize(on.stream));
        OK(cu.copy_to_host_now(&got, on.memory, sizeof got));
        processor()->dequantize(wanted.source, wanted.values, wanted.scales, count, 0.3f, adds);
        expect_same(got.source, wanted.source, QUANTIZED_MAX);
    }
}

static void blocks_of_8_bits_have_the_bits_of_the_processor(void **state)
{
    static const size_t counts[] = {0, 1, 31, 255, 256, 257, 4096, 4103, 12345, QUANTIZED_MAX};
    (void)state;
    begin("");
    for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
        quantize_and_compare(counts[c], true);
        quantize_and_compare(counts[c], false);
    }
    expect_count("blocks", (QUANTIZED_MAX / SHOAL_GPU_ELEMENTS + SHOAL_GPU_THREADS - 1) / SHOAL_GPU_THREADS);
    end();
}

/* ---- Squares ------------------------------------------------------------------------------------------------------------- */

static const enum shoal_type floats[] = {SHOAL_FLOAT32, SHOAL_FLOAT64, SHOAL_BFLOAT16, SHOAL_FLOAT16};

/* Fills with ordinary numbers, or also with some that are not finite. */
static void fill_squared(enum shoal_type type, char *at, size_t count, bool is_finite)
{
    for (size_t i = 0; i < count; i++) {
        const double wide = (double)(int32_t)draw() * 1e-6;
        const float single = is_finite || draw_below(3000) ? (float)wide : i % 2 ? INFINITY : NAN;
        uint32_t word;
        memcpy(&word, &single, sizeof word);
        if (type == SHOAL_FLOAT64)
            ((double *)(void *)at)[i] = isfinite(single) ? wide * 1e150 : (double)single;
        else if (type == SHOAL_FLOAT32)
            ((float *)(void *)at)[i] = single;
        else if (type == SHOAL_BFLOAT16)
            ((uint16_t *)(void *)at)[i] = (uint16_t)(word >> 16);
        else
            ((uint16_t *)(void *)at)[i] = isfinite(single) ? (uint16_t)(draw() & 0xbbff) : 0x7c01;
    }
}

/* The sum over chunks equals the processor's. A chunk is bad if one of its values is not finite. */
static void square_and_compare(enum shoal_type type, size_t count, double factor, bool is_finite)
{
    static char values[MEMORY_BYTES / 2];
    static double got[2 * 64 + 1];
    const size_t element = shoal_type_bytes(type), chunks = (count + SHOAL_GPU_SQUARED_CHUNK - 1) / SHOAL_GPU_SQUARED_CHUNK;
    const shoal_cu_address from = on.memory + element * draw_below(8), to = on.memory + sizeof values + 64;
    const struct shoal_gradient_kernels *own = processor(); /* once: on a virtual machine it takes long to query the features */
    double sum = 0, wanted = 0;
    bool is_bad = false, is_said_bad = false;
    fill_squared(type, values, count, is_finite);
    OK(cu.copy_to_device_now(from, values, count * element + 1));
    got[2 * chunks] = 42;
    OK(cu.copy_to_device_now(to, got, (2 * chunks + 1) * sizeof *got));
    assert_int_equal(shoal_gpu_square(on.kernels, type, to, from, count, factor, on.stream), SHOAL_OK);
    OK(cu.stream_synchronize(on.stream));
    OK(cu.copy_to_host_now(got, to, (2 * chunks + 1) * sizeof *got));
    for (size_t c = 0; c < chunks; c++) {
        sum += got[2 * c];
        is_said_bad |= isnan(got[2 * c + 1]);
        assert_true(isnan(got[2 * c + 1]) || got[2 * c + 1] == 0);
    }
    for (size_t i = 0; i < count; i++) {
        double value = 0;
        own->move[type](NULL, values + i * element, 1, 1, false, &value);
        is_bad |= type == SHOAL_FLOAT64 ? !isfinite(((double *)(void *)values)[i]) : !isfinite(value);
    }
    own->move[type](NULL, values, count, factor, false, &wanted);
    assert_true(got[2 * chunks] == 42 && is_bad == is_said_bad);
    if (memcmp(&sum, &wanted, sizeof sum) != 0 && !(isnan(sum) && isnan(wanted)))
        fail_msg("type %d, %zu values: squares are %a, not %a", (int)type, count, sum, wanted);
}

static void squares_have_the_bits_of_the_processor(void **state)
{
    static const size_t counts[] = {0, 1, 15, 16, 17, 4095, 4096, 4097, 8200, 50000};
    (void)state;
    begin("");
    for (size_t t = 0; t < SHOAL_COUNT_OF(floats); t++) {
        for (size_t c = 0; c < SHOAL_COUNT_OF(counts); c++) {
            square_and_compare(floats[t], counts[c], c % 2 ? 1 : 1 / 3.0, true);
            square_and_compare(floats[t], counts[c], 1, false);
        }
    }
    expect_count("blocks", (50000 / SHOAL_GPU_SQUARED_CHUNK + 1) * SHOAL_GPU_SQUARED_TEAM / SHOAL_GPU_THREADS + 1);
    end();
}

/* ---- Launches ------------------------------------------------------------------------------------------------------------ */

/* Two numbers and their sum in on.memory, for tests that are not about numbers. */
static struct shoal_gpu_reduction two_numbers(void)
{
    return (struct shoal_gpu_reduction){.type = SHOAL_INT32,
                                        .op = SHOAL_SUM,
                                        .dest = on.memory + 64,
                                        .sources = {on.memory, on.memory + 32},
                                        .source_count = 2,
                                        .count = 1};
}

static void expect_sum(const struct shoal_gpu_reduction *reduction)
{
    const int32_t one = 40, two = 2;
    int32_t sum = 0;
    OK(cu.copy_to_device(reduction->sources[0], &one, sizeof one, on.stream));
    OK(cu.copy_to_device(reduction->sources[1], &two, sizeof two, on.stream));
    assert_int_equal(shoal_gpu_reduce(on.kernels, reduction, on.stream), SHOAL_OK);
    OK(cu.copy_to_host(&sum, reduction->dest, sizeof sum, on.stream));
    OK(cu.stream_synchronize(on.stream));
    assert_int_equal(sum, 42);
}

static void launches_keep_the_order_of_their_stream(void **state)
{
    (void)state;
    for (int seed = 1; seed <= 5; seed++) {
        char modes[64];
        snprintf(modes, sizeof modes, "late=50,torn=4,poison,seed=%d", seed);
        begin(modes);
        const struct shoal_gpu_reduction reduction = two_numbers();
        expect_sum(&reduction);
        expect_count("blocks", 1);
        end();
    }
}

static void one_source_is_copied_without_a_kernel(void **state)
{
    struct shoal_gpu_reduction reduction;
    int32_t number = 7, got = 0;
    (void)state;
    begin("");
    reduction = two_numbers();
    reduction.source_count = 1;
    OK(cu.copy_to_device_now(on.memory, &number, sizeof number));
    assert_int_equal(shoal_gpu_reduce(on.kernels, &reduction, NULL), SHOAL_OK);
    OK(cu.copy_to_host_now(&got, reduction.dest, sizeof got));
    assert_int_equal(got, 7);
    reduction.dest = reduction.sources[0];
    control.fail_of("cuMemcpyAsync", 1, SHOAL_CU_INVALID_VALUE);
    assert_int_equal(shoal_gpu_reduce(on.kernels, &reduction, NULL), SHOAL_OK); /* the kernel is available */
    reduction.dest = on.memory + 64;
    expect_said(shoal_gpu_reduce(on.kernels, &reduction, NULL), SHOAL_ERR_ARGUMENT, "copying on a device (device 0)",
                "cuMemcpyAsync answered CUDA_ERROR_INVALID_VALUE");
    expect_count("blocks", 0);
    end();
}

/* A kernel of the first device adds memory of the second. */
static void sources_may_be_a_peers(void **state)
{
    (void)state;
    begin("");
    struct shoal_gpu_reduction reduction = two_numbers();
    OK(cu.context_push(contexts[1]));
    reduction.sources[1] = make_memory(64);
    OK(cu.context_pop(NULL));
    OK(cu.peer_enable(contexts[1], 0));
    expect_sum(&reduction);
    end();
}

/* The arguments of each kernel match their declarations in the code for GPUs, which has no other kernel. */
static void the_code_for_devices_takes_these_arguments(void **state)
{
    static const struct {
        const char *name;
        size_t bytes;
    } rows[] = {
#define ROW(NAME, ARGS) {#NAME, sizeof(struct ARGS)},
        SHOAL_GPU_KERNEL_LIST(ROW)
#define REDUCE(TYPE, OP, LOOPS) OWN_LOOPS(TYPE, LOOPS, ROW(reduce_##TYPE##_##OP, shoal_gpu_reduce_args))
#define REDUCES(TYPE, MEMORY, LANE, FORM, OPS, UNSIGNED) OPS(REDUCE, TYPE, UNSIGNED)
            TYPES(REDUCES)};
    size_t entries = 0;
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        char text[256];
        const char *name = rows[i].name;
        snprintf(text, sizeof text, ".visible .entry %s(\n\t.param .align 8 .b8 %s_param_0[%zu]\n)\n.maxntid %d, 1, 1\n", name,
                 name, rows[i].bytes, SHOAL_GPU_THREADS);
        if (!strstr(shoal_gpu_kernels_ptx, text))
            fail_msg("the code for GPUs has no %s", text);
    }
    for (const char *at = shoal_gpu_kernels_ptx; (at = strstr(at, ".entry")) != NULL; at++)
        entries++;
    assert_int_equal(entries, SHOAL_COUNT_OF(rows));
}

static void nothing_is_launched_for_no_elements(void **state)
{
    struct shoal_gpu_reduction reduction;
    (void)state;
    begin("");
    reduction = two_numbers();
    reduction.count = 0;
    control.fail_of("cuLaunchKernel", 1, SHOAL_CU_INVALID_VALUE);
    assert_int_equal(shoal_gpu_reduce(on.kernels, &reduction, NULL), SHOAL_OK);
    assert_int_equal(shoal_gpu_quantize(on.kernels, 0, 0, 0, 0, 0, NULL), SHOAL_OK);
    assert_int_equal(shoal_gpu_narrow(on.kernels, SHOAL_FLOAT16, 0, 0, 0, 1, NULL), SHOAL_OK);
    reduction.count = 1;
    expect_said(shoal_gpu_reduce(on.kernels, &reduction, NULL), SHOAL_ERR_ARGUMENT, "reducing on a device (device 0)",
                "cuLaunchKernel answered CUDA_ERROR_INVALID_VALUE");
    end();
}

/* ---- What goes wrong ----------------------------------------------------------------------------------------------------- */

static void a_refused_launch_is_named(void **state)
{
    static const struct {
        const char *call;
        int result;
        enum shoal_status status;
    } rows[] = {
        {"cuCtxPushCurrent", SHOAL_CU_CONTEXT_IS_DESTROYED, SHOAL_ERR_SYSTEM},
        {"cuLaunchKernel", SHOAL_CU_LAUNCH_OUT_OF_RESOURCES, SHOAL_ERR_SYSTEM},
        {"cuLaunchKernel", SHOAL_CU_OUT_OF_MEMORY, SHOAL_ERR_MEMORY},
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        begin("");
        const struct shoal_gpu_reduction reduction = two_numbers();
        control.fail_of(rows[i].call, 1, rows[i].result);
        expect_said(shoal_gpu_reduce(on.kernels, &reduction, on.stream), rows[i].status, rows[i].call, "CUDA_ERROR_");
        expect_sum(&reduction);
        end();
    }
}

/* Loading is refused with these words, and nothing remains allocated. */
static void expect_no_kernels(enum shoal_status status, const char *first, const char *second)
{
    struct shoal_gpu_kernels *kernels = NULL;
    expect_said(shoal_gpu_kernels_open(on.gpu, contexts[0], &kernels), status, first, second);
    assert_null(kernels);
    expect_count("modules", 1); /* the module of the bench */
    expect_count("stack", 1);   /* the current one */
}

static void kernels_that_cannot_be_loaded_are_refused(void **state)
{
    static const struct {
        const char *call;
        int nth, result;
        enum shoal_status status;
        const char *first, *second;
    } rows[] = {
        {"cuCtxPushCurrent", 1, SHOAL_CU_INVALID_CONTEXT, SHOAL_ERR_ARGUMENT, "cuCtxPushCurrent", "INVALID_CONTEXT"},
        {"cuCtxPushCurrent", 2, SHOAL_CU_INVALID_CONTEXT, SHOAL_ERR_ARGUMENT, "cuCtxPushCurrent", "INVALID_CONTEXT"},
        {"cuModuleLoadData", 1, SHOAL_CU_UNSUPPORTED_PTX_VERSION, SHOAL_ERR_UNSUPPORTED, "loading kernels", "install a newer"},
        {"cuModuleLoadData", 1, SHOAL_CU_JIT_COMPILER_NOT_FOUND, SHOAL_ERR_UNSUPPORTED, "JIT_COMPILER", "ptxjitcompiler.so.1"},
        {"cuModuleLoadData", 1, SHOAL_CU_JIT_COMPILATION_DISABLED, SHOAL_ERR_UNSUPPORTED, "loading", "CUDA_DISABLE_PTX_JIT"},
        {"cuModuleLoadData", 1, SHOAL_CU_NO_BINARY_FOR_GPU, SHOAL_ERR_UNSUPPORTED, "NO_BINARY_FOR_GPU", "for this device"},
        {"cuModuleGetFunction", 1, SHOAL_CU_NOT_FOUND, SHOAL_ERR_SYSTEM, "kernel reduce_FLOAT32_SUM", "NOT_FOUND"},
        {"cuModuleGetFunction", 61, SHOAL_CU_OUT_OF_MEMORY, SHOAL_ERR_MEMORY, "kernel to_bfloat16", "OUT_OF_MEMORY"},
    };
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(rows); i++) {
        begin("");
        control.fail_of(rows[i].call, rows[i].nth, rows[i].result);
        expect_no_kernels(rows[i].status, rows[i].first, rows[i].second);
        end();
    }
}

/* A driver without the entry points cannot run them, nor can an old device. */
static void drivers_and_devices_that_cannot_are_refused(void **state)
{
    static const char *const calls[] = {"cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload", "cuLaunchKernel",
                                        "cuDeviceGetAttribute"};
    (void)state;
    for (size_t i = 0; i < SHOAL_COUNT_OF(calls); i++) {
        begin("");
        const bool is_old = strcmp(calls[i], "cuDeviceGetAttribute") == 0;
        struct shoal_gpu *gpu = on.gpu;
        if (is_old)
            control.fail_of(calls[i], 1, SHOAL_CU_INVALID_VALUE); /* the query fails: compute capability 0 */
        else
            control.hide_of(calls[i]);
        assert_int_equal(shoal_gpu_open(&quiet, &on.gpu), SHOAL_OK);
        expect_no_kernels(SHOAL_ERR_UNSUPPORTED, is_old ? "kernels need 7.0 or more" : "cannot load kernels", "");
        shoal_gpu_close(on.gpu);
        on.gpu = gpu;
        end();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reductions_have_the_bits_of_the_processor),
        cmocka_unit_test(casts_have_the_bits_of_the_processor),
        cmocka_unit_test(blocks_of_8_bits_have_the_bits_of_the_processor),
        cmocka_unit_test(squares_have_the_bits_of_the_processor),
        cmocka_unit_test(launches_keep_the_order_of_their_stream),
    };
    const struct CMUnitTest refusals[] = {
        cmocka_unit_test(one_source_is_copied_without_a_kernel),
        cmocka_unit_test(sources_may_be_a_peers),
        cmocka_unit_test(the_code_for_devices_takes_these_arguments),
        cmocka_unit_test(nothing_is_launched_for_no_elements),
        cmocka_unit_test(a_refused_launch_is_named),
        cmocka_unit_test(kernels_that_cannot_be_loaded_are_refused),
        cmocka_unit_test(drivers_and_devices_that_cannot_are_refused),
    };
    mock_client_open(is_real() ? getenv("SHOAL_TEST_CUDA") : MOCK_CUDA, is_real());
    shoal_log_init_quiet(&quiet);
    int failed = cmocka_run_group_tests_name("gpu_kernels", tests, NULL, NULL);
    if (!is_real())
        failed += cmocka_run_group_tests_name("gpu_kernels_refused", refusals, NULL, NULL);
    shoal_log_fini(&quiet);
    return failed;
}
