// The streams that order calls whose tensors are on a device. It uses torch's classes for any kind of device, so nothing here
// depends on CUDA, except CudaStreams for old versions of torch. The library decides which memory it can serve.
//
//     caller's current stream | kernels | begun |   more kernels   | wait(): waits for end | kernels that read |
//                                           v                                 ^
//     work stream of the group              | the library's copies | copies back | end |
//
// An asynchronous call uses a work stream of its group; a synchronous one uses the current stream itself, as over NCCL.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

namespace {

// Since torch 2.13, c10::Stream has methods that return the driver's handle of a stream and whether a graph is captured on it.
template <class Stream, class = void>
struct TellsHandle : std::false_type {
};
template <class Stream>
struct TellsHandle<Stream, std::void_t<decltype(std::declval<const Stream>().native_handle()),
                                       decltype(std::declval<const Stream>().is_capturing())>> : std::true_type {
};

// Before torch 2.13 only c10::cuda::CUDAStream has them, and its header needs CUDA's headers. So its method is looked up by
// name in torch's library (a CUDAStream has one member, a c10::Stream), and the driver is asked about captures.
struct CudaStreams {
    using Handle = void *(const c10::Stream *);          // CUDAStream::stream() const
    using IsCapturing = int(void *stream, int *capture); // cuStreamIsCapturing; capture: 0 is none
    static constexpr char kHandle[] = "_ZNK3c104cuda10CUDAStream6streamEv", kIsCapturing[] = "cuStreamIsCapturing";
    Handle *handle = find<Handle>("libc10_cuda.so", kHandle);
    IsCapturing *is_capturing = find<IsCapturing>("libcuda.so.1", kIsCapturing);

    bool is_captured(const c10::Stream &stream) const
    {
        int capture = 0;
        return is_capturing(handle(&stream), &capture) == 0 && capture != 0;
    }

    // Call this only once a tensor is on a CUDA device: torch has then loaded both libraries.
    static const CudaStreams &instance()
    {
        static const CudaStreams streams;
        return streams;
    }

  private:
    template <class Function>
    static Function *find(const char *library, const char *name)
    {
        void *loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
        return loaded ? reinterpret_cast<Function *>(dlsym(loaded, name)) : nullptr;
    }
};

void check_tells_handles(const c10::Device &device, const char *what)
{
    if (TellsHandle<c10::Stream>::value)
        return;
    TORCH_CHECK_NOT_IMPLEMENTED(device.type() == c10::kCUDA, "shoal: ", what, " ", device,
                                ", but torch " TORCH_VERSION " has no method for the handles of its streams "
                                "(c10::Stream::native_handle): use torch 2.13 or newer");
    const CudaStreams &streams = CudaStreams::instance();
    TORCH_CHECK_NOT_IMPLEMENTED(streams.handle && streams.is_capturing, "shoal: ", what, " ", device,
                                ", but the handles of torch " TORCH_VERSION "'s streams are not available: ",
                                streams.handle ? CudaStreams::kIsCapturing : CudaStreams::kHandle, " was not found in ",
                                streams.handle ? "libcuda.so.1" : "libc10_cuda.so",
                                ": use torch 2.13 or newer, or \"cpu:shoal,cuda:nccl\"");
}

// Returns the driver's handle of a stream, for shoal_options.
template <class Stream>
void *handle_of(const Stream &stream)
{
    if constexpr (TellsHandle<Stream>::value)
        return stream.native_handle();
    else
        return CudaStreams::instance().handle(&stream);
}

template <class Stream>
bool is_captured(const Stream &stream)
{
    if constexpr (TellsHandle<Stream>::value)
        return stream.is_capturing();
    else
        return CudaStreams::instance().is_captured(stream);
}

// Returns true if the library may know the driver of such devices. Memory of other devices would be mistaken for host memory.
bool is_served(c10::DeviceType type)
{
#ifdef SHOAL_TORCH_ROCM
    return type == c10::kPrivateUse1;
#else
    return (type == c10::kCUDA || type == c10::kPrivateUse1) && c10::impl::hasDeviceGuardImpl(type);
#endif
}

void check_served(const at::Tensor &tensor)
{
    TORCH_CHECK_VALUE(
        is_served(tensor.device().type()), "shoal: a tensor is on ", tensor.device(),
        ", which is not a device of CUDA's driver; this back-end serves those and the CPU: use another back-end for "
        "such tensors, as \"cpu:shoal,xpu:xccl\" does, or copy them to the CPU");
    check_tells_handles(tensor.device(), "a tensor is on");
}

c10::Stream current_stream(c10::Device device)
{
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// A group's work streams. Sends and receives each have one of their own: a rank that sends first and then receives must not
// wait behind a peer that does the same. For the same reason, groups of a process share no stream as long as torch's small
// pool, which hands out its streams in turn, has others.
class WorkStreams {
  public:
    WorkStreams() = default;
    WorkStreams(const WorkStreams &) = delete;
    WorkStreams &operator=(const WorkStreams &) = delete;
    ~WorkStreams()
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (const Entry &entry : entries_)
            taken.erase(std::find(taken.begin(), taken.end(), entry.stream));
    }

    // The host waits for the current streams of the devices that the group has served.
    void wait_for_current()
    {
        std::unique_lock<std::mutex> lock(mutex);
        const std::vector<c10::Device> devices = devices_;
        lock.unlock();
        for (const c10::Device &device : devices)
            current_stream(device).synchronize();
    }

    // Returns the stream of a call: the current one, or a work stream that continues after the work on the current one.
    c10::Stream enter(c10::Device device, c10d::OpType type, bool is_at_once)
    {
        const c10::Stream current = current_stream(device);
        TORCH_CHECK_NOT_IMPLEMENTED(
            !is_captured(current), "shoal: the current stream of ", device,
            " is being captured into a graph, and Shoal's calls cannot be replayed: call it outside of the "
            "capture");
        note(device);
        return is_at_once ? current : fork(current, type);
    }

  private:
    struct Entry {
        c10d::OpType way;
        c10::Stream stream;
    };

    void note(c10::Device device)
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (std::find(devices_.begin(), devices_.end(), device) == devices_.end())
            devices_.push_back(device);
    }

    c10::Stream fork(const c10::Stream &current, c10d::OpType type)
    {
        const c10::Stream stream = find(current.device(), type);
        c10::Event begun(current.device_type());
        begun.record(current);
        begun.block(stream);
        return stream;
    }

    c10::Stream find(c10::Device device, c10d::OpType type)
    {
        const bool is_message = type == c10d::OpType::SEND || type == c10d::OpType::RECV;
        const c10d::OpType way = is_message ? type : c10d::OpType::UNKNOWN;
        std::lock_guard<std::mutex> lock(mutex);
        for (const Entry &entry : entries_)
            if (entry.way == way && entry.stream.device() == device)
                return entry.stream;
        entries_.push_back({way, take(device)});
        return entries_.back().stream;
    }

    static c10::Stream take(c10::Device device)
    {
        const c10::impl::VirtualGuardImpl guard(device.type());
        c10::Stream stream = guard.getStreamFromGlobalPool(device);
        for (int i = 1; i < kPool && std::find(taken.begin(), taken.end(), stream) != taken.end(); i++)
            stream = guard.getStreamFromGlobalPool(device);
        taken.push_back(stream);
        return stream;
    }

    static constexpr int kPool = 32; // size of torch's pool of CUDA streams
    inline static std::mutex mutex;
    inline static std::vector<c10::Stream> taken; // by groups of this process
    std::vector<Entry> entries_;
    std::vector<c10::Device> devices_;
};

} // namespace
