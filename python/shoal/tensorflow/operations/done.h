/* The end of an asynchronous kernel, kept for later. TensorFlow gives a kernel the address of a std::function<void()> that dies
 * when the kernel returns, so a kernel that is done later has to copy it. Done here in C, by what libstdc++ makes of a
 * std::function, which is part of its binary interface: the same since GCC 4.5, and in every TensorFlow for Linux that pip
 * installs. A C++ compiler would write the same layout into a program; tests/tensorflow/test_loading.py compares with that of
 * the machine. done_copy checks what it finds before it relies on it. In C++ the library would need a C++ compiler to be built
 * and libstdc++ to be loaded, and with another C++ library it would fail where this one refuses. */
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

/* False: this is no std::function of libstdc++, so the kernel has to end before it returns. */
bool done_copy(struct done *copy, const TF_AsyncOpKernelDoneCallback *callback);

/* Calls it and frees the copy. The kernel's context is dead afterwards. */
void done_run(struct done *copy);

#endif
