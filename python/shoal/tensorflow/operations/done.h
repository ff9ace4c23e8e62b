/* Keeps the completion callback of an asynchronous kernel for later.
 *
 * TensorFlow passes a kernel the address of a std::function<void()> that dies when the kernel returns, so a kernel that
 * completes later has to copy it. This module does so in C, by the layout of std::function in libstdc++. The layout is part of
 * libstdc++'s binary interface, unchanged since GCC 4.5, and every TensorFlow for Linux that pip installs uses it. A C++
 * compiler would put the same layout into a program; tests/tensorflow/test_loading.py compares it with that of the machine.
 * done_copy checks what it finds before it relies on it.
 *
 * In C++, the library would need a C++ compiler for its build and libstdc++ at run time, and with another C++ library it would
 * crash where this one refuses. */
#ifndef SHOAL_TENSORFLOW_DONE_H
#define SHOAL_TENSORFLOW_DONE_H

#include <stdbool.h>

#include "tf_api.h"

struct done_functor {
    void *words[2];
};

struct done {
    struct done_functor functor;
    bool (*manage)(struct done_functor *to, const struct done_functor *from, int operation);
    void (*invoke)(const struct done_functor *functor);
};

/* Returns false if this is not a std::function of libstdc++; the kernel then has to end before it returns. */
bool done_copy(struct done *copy, const TF_AsyncOpKernelDoneCallback *callback);

/* Calls the callback and frees the copy. The kernel's context is invalid afterwards. */
void done_run(struct done *copy);

#endif
