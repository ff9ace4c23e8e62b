// Shoal as a back-end of torch.distributed: a c10d::Backend over the C library's public header.
//
// It maps types, keeps tensors alive, completes works and writes error texts; the library does everything else. Contexts and
// communicators are made in Python (_communicator.py), as for the other shim. _compile.py compiles it against the user's torch.
// It overrides only what torch 2.4 has; methods that later versions added are declared without `override`.
//
// The parts are headers that only this file includes, because torch's own headers take most of the minute of compiling:
//
//     gil.h, types.h <---- communicator.h <-.
//     gil.h <- completer.h <----------------- work.h <- poster.h <- backend.h <- module.cpp
//     streams.h, types.h <---- operands.h <-'
//
// Threads. Any thread may call any method. No thread waits for a lock of the library while it holds the GIL, because the
// driving thread may free tensors that belong to Python. Callbacks of futures may wait for other works, so they never run on
// the driving thread: see Completer.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"

namespace {

// Makes the back-end over a communicator that shoal.torch made, and takes ownership of it. Addresses are passed as numbers.
Ref<c10d::Backend> create(uintptr_t context, uintptr_t comm, int rank, int size, milliseconds timeout, std::string name,
                          std::vector<int64_t> ranks)
{
    auto *of_process = reinterpret_cast<shoal_context *>(context);
    auto *of_group = reinterpret_cast<shoal_comm *>(comm);
    auto group = std::make_shared<Communicator>(of_process, of_group, std::move(name), std::move(ranks));
    return c10::make_intrusive<ShoalBackend>(std::move(group), rank, size, timeout);
}

at::Tensor empty(uintptr_t context, int64_t bytes)
{
    return shared_bytes(reinterpret_cast<shoal_context *>(context), bytes);
}

// Bytes of a device's memory. `owner` keeps them until the last tensor that views them is gone.
at::Tensor bytes_at(uintptr_t address, int64_t count, at::Device device, pybind11::object owner)
{
    auto *held = new pybind11::object(std::move(owner));
    const auto let_go = [held](void *) {
        pybind11::gil_scoped_acquire gil;
        delete held;
    };
    const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(device);
    return at::from_blob(reinterpret_cast<void *>(address), {count}, let_go, options, device);
}

uintptr_t handle_as_number(const c10::Stream &stream)
{
    check_tells_handles(stream.device(), "a stream is wanted of");
    return reinterpret_cast<uintptr_t>(handle_of(stream));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("create", &create, "The back-end of a group over its communicator.", pybind11::arg("context"),
               pybind11::arg("comm"), pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("timeout"),
               pybind11::arg("name"), pybind11::arg("ranks"));
    // Python callers, such as FSDP2, get the type that they ask for, also complex types. DDP calls allocateTensor in C++.
    pybind11::class_<ShoalBackend, c10d::Backend, Ref<ShoalBackend>>(module, "ShoalBackend")
        .def(
            "allocate_tensor",
            [](ShoalBackend &backend, long size, at::ScalarType dtype, at::Device device) {
                WithoutGil released;
                return backend.allocate(size, at::TensorOptions().dtype(dtype).device(device));
            },
            pybind11::arg("size"), pybind11::kw_only(), pybind11::arg("dtype"), pybind11::arg("device"));
    module.def("finish", [] { Completer::instance().finish(); }, "Ends the threads that complete futures; at exit.");
    module.def("empty", &empty, "A tensor of bytes that the host's other ranks map.", pybind11::arg("context"),
               pybind11::arg("bytes"));
    module.def("bytes_at", &bytes_at, "A tensor of bytes over memory of a device, which owner keeps.", pybind11::arg("address"),
               pybind11::arg("count"), pybind11::arg("device"), pybind11::arg("owner"));
    module.def("handle_of", &handle_as_number, "The driver's handle of a stream.", pybind11::arg("stream"));
}
