/* std::function<void()> of libstdc++, copied and called from C. */
#include "done.h"

#include <dlfcn.h>
#include <string.h>

/* std::_Manager_operation */
enum { CLONE_FUNCTOR = 2, DESTROY_FUNCTOR = 3 };

static bool is_code(const void *address)
{
    Dl_info info;
    return address && dladdr(address, &info) != 0;
}

bool done_copy(struct done *copy, const TF_AsyncOpKernelDoneCallback *callback)
{
    struct done original;
    void *manage, *invoke;
    memcpy(&original, callback, sizeof original);
    memcpy(&manage, &original.manage, sizeof manage);
    memcpy(&invoke, &original.invoke, sizeof invoke);
    if (!is_code(manage) || !is_code(invoke))
        return false;
    *copy = original;
    original.manage(&copy->functor, (const struct done_functor *)(const void *)callback, CLONE_FUNCTOR);
    return true;
}

void done_run(struct done *copy)
{
    copy->invoke(&copy->functor);
    copy->manage(&copy->functor, &copy->functor, DESTROY_FUNCTOR);
}
