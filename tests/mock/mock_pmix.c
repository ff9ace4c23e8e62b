/* A PMIx for tests whose server does not answer: MOCK_PMIX_HANGS, "init", "size", "get" or "finalize", names the call that
 * never returns. Otherwise it has a job of one rank, or of MOCK_PMIX_SIZE, and no values of others. The loader finds it by its
 * name in the folder that it searches first. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <pmix.h>

#define EXPORT __attribute__((visibility("default")))

static void hang_in(const char *call)
{
    const char *hangs = getenv("MOCK_PMIX_HANGS");
    while (hangs && strcmp(hangs, call) == 0)
        pause();
}

EXPORT pmix_status_t PMIx_Init(pmix_proc_t *proc, pmix_info_t info[], size_t ninfo)
{
    (void)info, (void)ninfo;
    hang_in("init");
    memset(proc, 0, sizeof *proc);
    strcpy(proc->nspace, "mock");
    return PMIX_SUCCESS;
}

EXPORT pmix_status_t PMIx_Finalize(const pmix_info_t info[], size_t ninfo)
{
    (void)info, (void)ninfo;
    hang_in("finalize");
    return PMIX_SUCCESS;
}

EXPORT pmix_status_t PMIx_Put(pmix_scope_t scope, const char key[], pmix_value_t *val)
{
    (void)scope, (void)key, (void)val;
    return PMIX_SUCCESS;
}

EXPORT pmix_status_t PMIx_Commit(void)
{
    return PMIX_SUCCESS;
}

EXPORT pmix_status_t PMIx_Get(const pmix_proc_t *proc, const char key[], const pmix_info_t info[], size_t ninfo,
                              pmix_value_t **val)
{
    (void)proc, (void)info, (void)ninfo;
    const char *size = getenv("MOCK_PMIX_SIZE");
    if (strcmp(key, PMIX_JOB_SIZE) != 0) {
        hang_in("get");
        return PMIX_ERR_NOT_FOUND;
    }
    hang_in("size");
    *val = calloc(1, sizeof **val);
    (*val)->type = PMIX_UINT32;
    (*val)->data.uint32 = size ? (uint32_t)atoi(size) : 1;
    return PMIX_SUCCESS;
}

EXPORT pmix_status_t PMIx_Fence_nb(const pmix_proc_t procs[], size_t nprocs, const pmix_info_t info[], size_t ninfo,
                                   pmix_op_cbfunc_t cbfunc, void *cbdata)
{
    (void)procs, (void)nprocs, (void)info, (void)ninfo;
    cbfunc(PMIX_SUCCESS, cbdata);
    return PMIX_SUCCESS;
}

EXPORT const char *PMIx_Error_string(pmix_status_t status)
{
    return status == PMIX_SUCCESS ? "SUCCESS" : status == PMIX_ERR_UNREACH ? "UNREACHABLE" : "ERROR";
}
