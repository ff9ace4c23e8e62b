/* Host functions run in the driver's callback thread, one at a time, and may not call the driver. */
#include <stdlib.h>

#include "mock_driver.h"

static struct {
    bool has_thread;
    struct mock_op *op; /* running, or about to; NULL: none */
    pthread_cond_t work;
} callback = {.work = PTHREAD_COND_INITIALIZER};

static void *run_callbacks(void *arg)
{
    (void)arg;
    mock_forbid_callbacks();
    pthread_mutex_lock(&mock.lock);
    for (;;) {
        while (!callback.op)
            pthread_cond_wait(&callback.work, &mock.lock);
        const struct mock_host_call call = callback.op->call;
        pthread_mutex_unlock(&mock.lock);
        call.function(call.arg);
        pthread_mutex_lock(&mock.lock);
        struct mock_op *op = callback.op;
        callback.op = NULL;
        op->is_running = false;
        mock_op_end(op);
    }
    return NULL;
}

static void start_thread(void)
{
    pthread_t thread;
    if (callback.has_thread)
        return;
    if (pthread_create(&thread, NULL, run_callbacks, NULL) != 0)
        abort();
    pthread_detach(thread);
    callback.has_thread = true;
}

bool mock_callback_is_free(void)
{
    return !callback.op;
}

void mock_callback_run(struct mock_op *op)
{
    start_thread();
    op->is_running = true;
    callback.op = op;
    pthread_cond_signal(&callback.work);
}

void mock_callback_forked(void)
{
    pthread_cond_init(&callback.work, NULL);
    callback.has_thread = false;
    callback.op = NULL;
}

shoal_cu_result mock_launch_host(shoal_cu_stream handle, shoal_cu_host_fn function, void *arg)
{
    ENTER("cuLaunchHostFunc", MOCK_CURRENT);
    struct mock_stream *stream;
    MOCK_TRY(mock_stream_for_work(&call, handle, &stream));
    if (!function)
        return SHOAL_CU_INVALID_VALUE;
    struct mock_op *op = mock_op_make(MOCK_CALL_HOST, NULL, NULL);
    op->call = (struct mock_host_call){function, arg};
    mock_post(stream, op);
    return SHOAL_CU_SUCCESS;
}
