/* Kernels: named functions of the host, which module images list. Each part of a launch is one block, and blocks run in a
 * random order. */
#include <stdlib.h>
#include <string.h>

#include "mock_driver.h"

#define ENTRY ".entry"
#define NAME_MAX_BYTES 256
#define THREADS_MAX 1024
#define SHARED_MAX (48u * 1024)

struct mock_function {
    struct mock_function *next; /* in the module */
    shoal_cu_function handle;
    struct mock_module *module;
    const struct mock_cuda_kernel *kernel;
};

struct mock_module {
    shoal_cu_module handle;
    struct mock_context *context;
    char *image; /* the list of kernels */
    struct mock_function *functions;
};

struct mock_launch {
    struct mock_cuda_block block;
    const struct mock_cuda_kernel *kernel;
    struct mock_context *context;
    void *values; /* of all arguments */
    void *arguments[16];
    size_t blocks, next, first;
    shoal_cu_result result;
};

static struct {
    const struct mock_cuda_kernel *kernels;
    size_t count;
    size_t most_blocks;
} known;

MOCK_API void mock_cuda_set_kernels(const struct mock_cuda_kernel *kernels, size_t count)
{
    pthread_mutex_lock(&mock.lock);
    known.kernels = kernels;
    known.count = count;
    pthread_mutex_unlock(&mock.lock);
}

size_t mock_most_blocks(void)
{
    return known.most_blocks;
}

/* ---- Images -------------------------------------------------------------------------------------------------------------- */

static bool is_own_image(const char *image)
{
    return strncmp(image, MOCK_CUDA_IMAGE, strlen(MOCK_CUDA_IMAGE)) == 0;
}

/* Returns PTX's kernels as an image of our own. Called once for a module, because the text is long. */
static char *list_entries(const char *image)
{
    char *list = mock_allocate_zeroed(strlen(MOCK_CUDA_IMAGE) + strlen(image) + 1);
    char *end = stpcpy(list, MOCK_CUDA_IMAGE);
    while ((image = strstr(image, ENTRY))) {
        image += strlen(ENTRY);
        image += strspn(image, " \t\n");
        end = mempcpy(end, image, strcspn(image, " \t\n("));
        *end++ = '\n';
    }
    return list;
}

static bool is_in_image(const char *image, const char *name)
{
    const size_t bytes = strlen(name);
    const char *line = image + strlen(MOCK_CUDA_IMAGE);
    while (*line) {
        const size_t length = strcspn(line, "\n");
        if (length == bytes && memcmp(line, name, bytes) == 0)
            return true;
        line += length;
        line += *line == '\n';
    }
    return false;
}

static const struct mock_cuda_kernel *find_kernel_in(const struct mock_cuda_kernel *kernels, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return NULL;
}

/* Finds a test's kernel, or Shoal's. */
static const struct mock_cuda_kernel *find_kernel(const char *name)
{
    const struct mock_cuda_kernel *kernel = find_kernel_in(known.kernels, known.count, name);
    return kernel ? kernel : find_kernel_in(mock_own_kernels, mock_own_kernel_count, name);
}

/* ---- Modules ------------------------------------------------------------------------------------------------------------- */

shoal_cu_result mock_module_load(shoal_cu_module *handle, const void *image)
{
    ENTER("cuModuleLoadData", MOCK_CURRENT | MOCK_UNSAFE);
    if (!image)
        return SHOAL_CU_INVALID_VALUE;
    if (!is_own_image(image) && !strstr(image, ".version"))
        return SHOAL_CU_INVALID_IMAGE;
    mock_wait_idle(&call);
    struct mock_module *module = mock_allocate_zeroed(sizeof *module);
    module->context = call.context;
    module->image = is_own_image(image) ? strdup(image) : list_entries(image);
    module->handle = (shoal_cu_module)mock_handle_make(MOCK_MODULE, module);
    *handle = module->handle;
    return SHOAL_CU_SUCCESS;
}

static void end_module(struct mock_module *module)
{
    while (module->functions) {
        struct mock_function *function = module->functions;
        module->functions = function->next;
        mock_handle_drop((uintptr_t)function->handle);
        free(function);
    }
    mock_handle_drop((uintptr_t)module->handle);
    free(module->image);
    free(module);
}

shoal_cu_result mock_module_unload(shoal_cu_module handle)
{
    ENTER("cuModuleUnload", MOCK_CURRENT | MOCK_UNSAFE);
    struct mock_module *module = mock_handle_find(MOCK_MODULE, (uintptr_t)handle);
    if (!module)
        return SHOAL_CU_INVALID_HANDLE;
    mock_wait_idle(&call);
    end_module(module);
    return SHOAL_CU_SUCCESS;
}

void mock_modules_forget(const struct mock_context *context)
{
    size_t at = 0;
    struct mock_module *module;
    while ((module = mock_handle_next(MOCK_MODULE, &at)))
        if (module->context == context)
            end_module(module);
}

void mock_modules_reset(void)
{
    memset(&known, 0, sizeof known);
}

/* With lazy loading this call loads the kernel, so it also waits. */
shoal_cu_result mock_module_function(shoal_cu_function *handle, shoal_cu_module module_handle, const char *name)
{
    ENTER("cuModuleGetFunction", MOCK_CURRENT | MOCK_UNSAFE);
    struct mock_module *module = mock_handle_find(MOCK_MODULE, (uintptr_t)module_handle);
    const struct mock_cuda_kernel *kernel = find_kernel(name);
    if (!module)
        return SHOAL_CU_INVALID_HANDLE;
    if (!kernel || !is_in_image(module->image, name))
        return SHOAL_CU_NOT_FOUND;
    mock_wait_idle(&call);
    struct mock_function *function = mock_allocate_zeroed(sizeof *function);
    function->module = module;
    function->kernel = kernel;
    function->handle = (shoal_cu_function)mock_handle_make(MOCK_FUNCTION, function);
    function->next = module->functions;
    module->functions = function;
    *handle = function->handle;
    return SHOAL_CU_SUCCESS;
}

shoal_cu_result mock_function_attribute(int *value, int attribute, shoal_cu_function handle)
{
    enum { MAX_THREADS = 0, REGISTERS = 4 };
    ENTER("cuFuncGetAttribute", MOCK_CURRENT);
    if (!mock_handle_find(MOCK_FUNCTION, (uintptr_t)handle))
        return SHOAL_CU_INVALID_HANDLE;
    *value = attribute == MAX_THREADS ? THREADS_MAX : attribute == REGISTERS ? 32 : 0;
    return SHOAL_CU_SUCCESS;
}

/* ---- Running ------------------------------------------------------------------------------------------------------------- */

bool mock_launch_part(struct mock_launch *launch)
{
    struct mock_cuda_block block = launch->block;
    const size_t number = (launch->first + launch->next) % launch->blocks;
    block.index[0] = (unsigned)(number % block.grid[0]);
    block.index[1] = (unsigned)(number / block.grid[0] % block.grid[1]);
    block.index[2] = (unsigned)(number / block.grid[0] / block.grid[1]);
    memset(block.shared, 0, SHARED_MAX);
    launch->kernel->run(&block, launch->arguments);
    return ++launch->next == launch->blocks;
}

shoal_cu_result mock_launch_result(const struct mock_launch *launch)
{
    return launch->result;
}

void mock_launch_free(struct mock_launch *launch)
{
    free(launch->block.shared);
    free(launch->values);
    free(launch);
}

static bool may_use(const struct mock_context *context, shoal_cu_address at)
{
    const struct mock_region *region = mock_region_find(at);
    const uint64_t own = UINT64_C(1) << (context->device % 64);
    if (region->kind == MOCK_MAPPED_MEMORY)
        return region->readers & own;
    if (region->kind == MOCK_HOST_MEMORY || region->kind == MOCK_IMPORTED_MEMORY)
        return true; /* opening it has enabled access */
    return context->peers & UINT64_C(1) << (region->device % 64);
}

/* Memory freed on a stream is available to earlier work on that stream. */
static bool find_span(shoal_cu_address at, size_t bytes, struct mock_span *span)
{
    struct mock_region *region = mock_region_find(at);
    if (!region || region->kind != MOCK_POOL_MEMORY)
        return mock_find_device_span(at, bytes, span) == SHOAL_CU_SUCCESS;
    *span = (struct mock_span){.holder = region, .bytes = region->alias + (at - region->at)};
    return at + bytes <= region->at + region->bytes;
}

/* Freeing waits for all launches, so the memory remains. */
MOCK_API void *mock_cuda_look_up(const struct mock_cuda_block *block, shoal_cu_address at, size_t bytes)
{
    struct mock_launch *launch = block->launch;
    struct mock_span span = {NULL, NULL};
    pthread_mutex_lock(&mock.lock);
    const bool is_there = find_span(at, bytes, &span) && may_use(launch->context, at);
    if (!is_there)
        launch->result = SHOAL_CU_ILLEGAL_ADDRESS;
    pthread_mutex_unlock(&mock.lock);
    return is_there ? span.bytes : NULL;
}

/* ---- Launching ----------------------------------------------------------------------------------------------------------- */

/* The driver reads the arguments when the kernel is launched, not when it runs. */
static void copy_arguments(struct mock_launch *launch, void **arguments)
{
    size_t bytes = 0;
    for (unsigned i = 0; i < launch->kernel->arguments; i++)
        bytes += shoal_round_up(launch->kernel->argument_bytes[i], 16);
    char *at = launch->values = mock_allocate_zeroed(bytes + 1);
    for (unsigned i = 0; i < launch->kernel->arguments; i++) {
        launch->arguments[i] = at;
        memcpy(at, arguments[i], launch->kernel->argument_bytes[i]);
        at += shoal_round_up(launch->kernel->argument_bytes[i], 16);
    }
}

static struct mock_launch *make_launch(const struct mock_call *call, const struct mock_function *function,
                                       const struct mock_cuda_block *dimensions, void **arguments)
{
    struct mock_launch *launch = mock_allocate_zeroed(sizeof *launch);
    launch->kernel = function->kernel;
    launch->context = call->context;
    launch->block = *dimensions;
    launch->block.launch = launch;
    launch->block.shared = mock_allocate_zeroed(SHARED_MAX);
    launch->blocks = (size_t)dimensions->grid[0] * dimensions->grid[1] * dimensions->grid[2];
    launch->first = (size_t)mock_draw(launch->blocks);
    known.most_blocks = shoal_max_size(known.most_blocks, launch->blocks);
    copy_arguments(launch, arguments);
    return launch;
}

static bool is_launchable(const struct mock_cuda_block *dimensions)
{
    const unsigned *grid = dimensions->grid, *block = dimensions->block;
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    return grid[0] && grid[1] && grid[2] && threads && threads <= THREADS_MAX;
}

shoal_cu_result mock_launch(shoal_cu_function handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, shoal_cu_stream stream_handle,
                            void **arguments, void **extra)
{
    ENTER("cuLaunchKernel", MOCK_CURRENT);
    const struct mock_cuda_block dimensions = {.grid = {grid_x, grid_y, grid_z}, .block = {block_x, block_y, block_z}};
    const struct mock_function *function = mock_handle_find(MOCK_FUNCTION, (uintptr_t)handle);
    struct mock_stream *stream;
    MOCK_TRY(mock_stream_for_work(&call, stream_handle, &stream));
    if (!function || function->module->context != call.context || stream->context != call.context)
        return SHOAL_CU_INVALID_HANDLE;
    if (!is_launchable(&dimensions) || shared_bytes > SHARED_MAX || extra || (!arguments && function->kernel->arguments))
        return SHOAL_CU_INVALID_VALUE;
    struct mock_op *op = mock_op_make(MOCK_LAUNCH, NULL, NULL);
    op->launch = make_launch(&call, function, &dimensions, arguments);
    mock_post(stream, op);
    return SHOAL_CU_SUCCESS;
}
