/* std::function<void()> of libstdc++, copied and called from C. */
#include "done.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#define KNOWN_MAX 16

/* std::_Manager_operation */
enum { CLONE_FUNCTOR = 2, DESTROY_FUNCTOR = 3 };

/* Returns true if the address is in loaded code. It keeps the addresses that it has found: TensorFlow has few kinds of
 * callbacks, and dladdr takes 0.3 ms for each, because it searches all of TensorFlow's symbols. */
static bool is_code(const void *address)
{
    static _Atomic(const void *) known[KNOWN_MAX];
    static atomic_uint found;
    Dl_info info;
    for (size_t i = 0; address && i < KNOWN_MAX; i++) {
        if (atomic_load_explicit(&known[i], memory_order_relaxed) == address)
            return true;
    }
    if (!address || dladdr(address, &info) == 0)
        return false;
    atomic_store_explicit(&known[atomic_fetch_add(&found, 1) % KNOWN_MAX], address, memory_order_relaxed);
    return true;
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
