// Python's lock and its signals, for threads that wait in the library.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <optional>

#include <torch/csrc/utils/pybind.h>

namespace {

using std::chrono::milliseconds;

// Gives the GIL back while it lives, if this thread has it.
class WithoutGil {
  public:
    WithoutGil()
    {
        if (Py_IsInitialized() && PyGILState_Check())
            released_.emplace();
    }

  private:
    std::optional<pybind11::gil_scoped_release> released_;
};

// Between two looks at signals; Ctrl-C is to be felt within a tenth of a second.
constexpr milliseconds kSlice{50};

// Runs Python's signal handlers where they may run, on the main thread; throws what they raised.
void raise_signals()
{
    if (!Py_IsInitialized() || syscall(SYS_gettid) != getpid())
        return;
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0)
        throw pybind11::error_already_set();
}

} // namespace
