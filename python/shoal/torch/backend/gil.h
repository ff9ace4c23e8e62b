// Python's global lock (GIL) and its signals, for threads that wait in the library.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <optional>

#include <torch/csrc/utils/pybind.h>

namespace {

using std::chrono::milliseconds;

// Releases the GIL for its lifetime, if this thread holds it.
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

// Time between two checks for signals, so that Ctrl-C takes effect within a tenth of a second.
constexpr milliseconds kSlice{50};

// Runs Python's signal handlers, which run on the main thread only. Throws what they raise.
void raise_signals()
{
    if (!Py_IsInitialized() || syscall(SYS_gettid) != getpid())
        return;
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0)
        throw pybind11::error_already_set();
}

} // namespace
