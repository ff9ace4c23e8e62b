// A torch device with the memory, streams and events of the stand-in driver, tests/mock/cuda. With it torch, the back-end, the
// library and the driver run together on machines without a GPU. stand_in.py compiles and registers it: as PrivateUse1, or with
// STAND_IN_NAME=cuda as CUDA, whose entries in torch's tables are unused in a torch built for CPUs.
//
// Copies inside the device, of any strides, are put on the current stream and return at once, as on a GPU. The CPU does
// everything else: torch copies operands to the host, computes, and copies back (CPU fallback), and the calling thread waits
// for the current stream each time. Memory is allocated and freed in the order of its stream, and reused at once. So it is a
// fault to free memory that another stream still uses, as happens without record_stream.
#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "mock_client.h"

namespace {

using at::Tensor;
using c10::DeviceIndex;

// Read when the module is loaded, so that one compiled module serves both names.
const bool kIsCuda = std::getenv("STAND_IN_NAME") && std::string(std::getenv("STAND_IN_NAME")) == "cuda";
const c10::DeviceType kType = kIsCuda ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
const c10::DispatchKey kKey = kIsCuda ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
constexpr int kStreams = 8; // in each device's pool: few, so that many of a program's streams are the same one
constexpr int kDims = 8;

// ---- Driver ----

void must(shoal_cu_result result, const char *call)
{
    const char *name = "?";
    if (result == SHOAL_CU_SUCCESS)
        return;
    cu.error_name(result, &name);
    TORCH_CHECK(false, "stand_in: ", call, " answered ", name);
}
#define CU(call) must(cu.call, #call)

struct DeviceState {
    shoal_cu_context context;
    shoal_cu_stream pool[kStreams];
    shoal_cu_function strided;
    c10::StreamId next = 0;
};
std::vector<DeviceState> devices;
std::mutex devices_lock; // of DeviceState::next

thread_local DeviceIndex current_index = 0;
thread_local std::vector<c10::StreamId> current_ids; // by device; 0, the default stream, if there is none

DeviceState &use(DeviceIndex index)
{
    DeviceState &state = devices.at(index);
    CU(context_set(state.context));
    return state;
}

c10::Stream stream_of(DeviceIndex index, c10::StreamId id)
{
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
}

c10::Stream current(DeviceIndex index)
{
    return stream_of(index, static_cast<size_t>(index) < current_ids.size() ? current_ids[index] : 0);
}

c10::Stream from_pool(DeviceIndex index)
{
    std::lock_guard<std::mutex> lock(devices_lock);
    return stream_of(index, 1 + devices.at(index).next++ % kStreams);
}

shoal_cu_stream handle(const c10::Stream &stream)
{
    DeviceState &state = use(stream.device_index());
    return stream.id() ? state.pool[stream.id() - 1] : SHOAL_CU_STREAM_LEGACY;
}

void wait_for(const c10::Stream &stream)
{
    CU(stream_synchronize(handle(stream)));
}

// ---- Memory ----

struct Block {
    shoal_cu_address at;
    c10::Stream stream;             // on which it was allocated
    std::vector<c10::Stream> users; // other streams that were recorded for it
};

// Makes `stream` wait for the work that is on `other` now.
void join(const c10::Stream &stream, const c10::Stream &other)
{
    shoal_cu_event event;
    use(other.device_index());
    CU(event_create(&event, SHOAL_CU_EVENT_NO_TIMING));
    CU(event_record(event, handle(other)));
    CU(stream_wait_event(handle(stream), event, 0));
    CU(event_destroy(event));
}

void release(void *context)
{
    Block *block = static_cast<Block *>(context);
    for (const c10::Stream &user : block->users)
        join(block->stream, user);
    CU(release_async(block->at, handle(block->stream)));
    delete block;
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        const c10::Stream stream = current(current_index);
        if (!bytes)
            return {nullptr, nullptr, &release, stream.device()};
        Block *block = new Block{0, stream, {}};
        CU(allocate_async(&block->at, bytes, handle(stream)));
        return {reinterpret_cast<void *>(block->at), block, &release, stream.device()};
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return &release;
    }
    void copy_data(void *, const void *, size_t) const override
    {
        TORCH_CHECK(false, "stand_in: copy_data");
    }
};
Memory memory;

void record_on(const c10::DataPtr &data, const c10::Stream &stream)
{
    Block *block = data.get_deleter() == &release ? static_cast<Block *>(data.get_context()) : nullptr; // else foreign memory
    if (block && stream != block->stream)
        block->users.push_back(stream);
}

// ---- Devices, streams and events, for torch ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return kType;
    }
    c10::Device exchangeDevice(c10::Device device) const override
    {
        return c10::Device(kType, std::exchange(current_index, device.index()));
    }
    c10::Device getDevice() const override
    {
        return c10::Device(kType, current_index);
    }
    void setDevice(c10::Device device) const override
    {
        current_index = device.index();
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override
    {
        current_index = device.index();
    }
    DeviceIndex deviceCount() const noexcept override
    {
        return static_cast<DeviceIndex>(devices.size());
    }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override
    {
        return {};
    }
    c10::Stream getStream(c10::Device device) const override
    {
        return current(index_of(device));
    }
    c10::Stream getDefaultStream(c10::Device device) const override
    {
        return stream_of(index_of(device), 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override
    {
        return from_pool(index_of(device));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override
    {
        return from_pool(index_of(device));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        const c10::Stream before = current(stream.device_index());
        current_ids.resize(devices.size());
        current_ids[stream.device_index()] = stream.id();
        return before;
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override
    {
        return stream.id() ? handle(stream) : nullptr; // as CUDA does
    }
    bool queryStream(const c10::Stream &stream) const override
    {
        return cu.stream_query(handle(stream)) == SHOAL_CU_SUCCESS;
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        wait_for(stream);
    }
    bool isStreamCapturing(const c10::Stream &stream) const override
    {
        int status;
        CU(stream_is_capturing(handle(stream), &status));
        return status != SHOAL_CU_CAPTURE_NONE;
    }
    void record(void **event, const c10::Stream &stream, const DeviceIndex, const c10::EventFlag) const override
    {
        const shoal_cu_stream on = handle(stream);
        if (!*event)
            CU(event_create(reinterpret_cast<shoal_cu_event *>(event), SHOAL_CU_EVENT_NO_TIMING));
        CU(event_record(static_cast<shoal_cu_event>(*event), on));
    }
    void block(void *event, const c10::Stream &stream) const override
    {
        if (event)
            CU(stream_wait_event(handle(stream), static_cast<shoal_cu_event>(event), 0));
    }
    bool queryEvent(void *event) const override
    {
        return !event || cu.event_query(static_cast<shoal_cu_event>(event)) == SHOAL_CU_SUCCESS;
    }
    void synchronizeEvent(void *event) const override
    {
        if (event)
            CU(event_synchronize(static_cast<shoal_cu_event>(event)));
    }
    void destroyEvent(void *event, const DeviceIndex) const noexcept override
    {
        if (event)
            cu.event_destroy(static_cast<shoal_cu_event>(event));
    }
    void synchronizeDevice(const DeviceIndex index) const override
    {
        use(index);
        CU(context_synchronize());
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override
    {
        record_on(data, stream);
    }

  private:
    static DeviceIndex index_of(c10::Device device)
    {
        return device.has_index() ? device.index() : current_index;
    }
};
const c10::impl::DeviceGuardImplRegistrar guard_registrar(kType, new Guard);

template <class Interface> struct Hooks : Interface {
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return !devices.empty();
    }
    bool hasPrimaryContext(DeviceIndex) const override
    {
        return !devices.empty();
    }
    DeviceIndex deviceCount() const override
    {
        return static_cast<DeviceIndex>(devices.size());
    }
    void setCurrentDevice(DeviceIndex index) const override
    {
        current_index = index;
    }
    DeviceIndex getCurrentDevice() const override
    {
        return current_index;
    }
    DeviceIndex exchangeDevice(DeviceIndex index) const override
    {
        return std::exchange(current_index, index);
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override
    {
        return index < 0 ? current_index : std::exchange(current_index, index);
    }
    const at::Generator &getDefaultGenerator(DeviceIndex) const override
    {
        return at::detail::getDefaultCPUGenerator();
    }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
    explicit CudaHooks(at::CUDAHooksArgs)
    {
    }
    void init() const override
    {
    }
    bool hasCUDA() const override
    {
        return true;
    }
};

struct PrivateHooks final : Hooks<at::PrivateUse1HooksInterface> {
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override
    {
        TORCH_CHECK(bytes <= storage.nbytes() || !storage.nbytes(), "stand_in: a tensor with contents cannot grow");
        if (bytes > storage.nbytes())
            storage.set_data_ptr_noswap(memory.allocate(bytes));
        storage.set_nbytes(bytes);
    }
};

void register_hooks()
{
    if (kIsCuda)
        at::CUDAHooksRegistry()->Register("CUDAHooks", at::RegistererCUDAHooksRegistry::DefaultCreator<CudaHooks>);
    else
        at::RegisterPrivateUse1HooksInterface(new PrivateHooks);
}

// ---- Copies ----

// A copy of elements in any order inside the device: the argument of a kernel.
struct Strided {
    shoal_cu_address to, from;
    int64_t bytes, dims, sizes[kDims], to_strides[kDims], from_strides[kDims];
};

int64_t span(const Strided &copy, const int64_t *strides)
{
    int64_t last = 0;
    for (int64_t dim = 0; dim < copy.dims; dim++)
        last += (copy.sizes[dim] - 1) * strides[dim];
    return (last + 1) * copy.bytes;
}

void run_strided(const mock_cuda_block *block, void *const *arguments)
{
    const Strided &copy = *static_cast<const Strided *>(arguments[0]);
    char *to = static_cast<char *>(control.look_up_of(block, copy.to, span(copy, copy.to_strides)));
    const char *from = static_cast<const char *>(control.look_up_of(block, copy.from, span(copy, copy.from_strides)));
    int64_t count = to && from ? 1 : 0;
    for (int64_t dim = 0; dim < copy.dims; dim++)
        count *= copy.sizes[dim];
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, to_at = 0, from_at = 0;
        for (int64_t dim = copy.dims - 1; dim >= 0; dim--) {
            to_at += rest % copy.sizes[dim] * copy.to_strides[dim];
            from_at += rest % copy.sizes[dim] * copy.from_strides[dim];
            rest /= copy.sizes[dim];
        }
        memcpy(to + to_at * copy.bytes, from + from_at * copy.bytes, copy.bytes);
    }
}

const mock_cuda_kernel kernels[] = {{"strided", run_strided, 1, {sizeof(Strided)}}};

shoal_cu_address address(const Tensor &tensor)
{
    return reinterpret_cast<shoal_cu_address>(tensor.data_ptr());
}

void copy_inside(const Tensor &from, const Tensor &to)
{
    const shoal_cu_stream stream = handle(current(to.device().index()));
    if (from.is_contiguous() && to.is_contiguous()) {
        CU(copy(address(to), address(from), to.nbytes(), stream));
        return;
    }
    TORCH_CHECK(to.dim() <= kDims, "stand_in: ", to.dim(), " dimensions");
    Strided copy = {address(to), address(from), static_cast<int64_t>(to.element_size()), to.dim(), {}, {}, {}};
    std::copy_n(to.sizes().data(), to.dim(), copy.sizes);
    std::copy_n(to.strides().data(), to.dim(), copy.to_strides);
    std::copy_n(from.strides().data(), to.dim(), copy.from_strides);
    void *arguments[] = {&copy};
    CU(launch(devices[to.device().index()].strided, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr));
}

void upload(const Tensor &host, const Tensor &to)
{
    const Tensor from = host.to(to.scalar_type()).expand(to.sizes()).contiguous();
    const Tensor plain = to.is_contiguous() ? to : at::empty(to.sizes(), to.options());
    const c10::Stream stream = current(to.device().index());
    CU(copy_to_device(address(plain), from.data_ptr(), from.nbytes(), handle(stream)));
    wait_for(stream); // until `from` has been read
    if (!to.is_contiguous())
        copy_inside(plain, to);
}

Tensor downloaded(const Tensor &from)
{
    const Tensor plain = from.is_contiguous() ? from : at::empty(from.sizes(), from.options());
    if (!from.is_contiguous())
        copy_inside(from, plain);
    const Tensor host = at::empty(from.sizes(), from.options().device(at::kCPU));
    const c10::Stream stream = current(from.device().index());
    CU(copy_to_host(host.data_ptr(), address(plain), host.nbytes(), handle(stream)));
    wait_for(stream);
    return host;
}

Tensor copy_from(const Tensor &given, const Tensor &to, bool)
{
    const Tensor from = given.expand(to.sizes());
    const bool is_inside = from.device() == to.device() && from.scalar_type() == to.scalar_type();
    if (!to.numel())
        return to;
    const c10::DeviceGuard guard(to.is_cpu() ? from.device() : to.device());
    if (from.is_conj() != to.is_conj()) {
        const Tensor host = (from.is_cpu() ? from : downloaded(from.conj()).conj()).resolve_conj();
        to.is_cpu() ? to.copy_(host) : (upload(host, to), to);
    } else if (is_inside)
        copy_inside(from, to);
    else if (from.is_cpu())
        upload(from, to);
    else if (to.is_cpu())
        to.copy_(downloaded(from));
    else
        upload(downloaded(from), to);
    return to;
}

// ---- Operators ----

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(type), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>)
{
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(type));
}

Tensor copy_from_and_resize(const Tensor &from, const Tensor &to)
{
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

// torch does not call _copy_from for devices that it knows itself.
Tensor &copy(Tensor &to, const Tensor &from, bool is_async)
{
    copy_from(from, to, is_async);
    return to;
}

at::Scalar local_scalar(const Tensor &tensor)
{
    return downloaded(tensor).item();
}

void record_stream(Tensor &tensor, c10::Stream stream)
{
    record_on(tensor.storage().data_ptr(), stream);
}

Tensor &set_storage(Tensor &tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride)
{
    return at::cpu::set_(tensor, storage, offset, size, stride);
}

void on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    at::native::cpu_fallback(op, stack);
}

void define_operators(torch::Library &m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("resize_", at::native::resize_);
    if (kIsCuda)
        m.impl("copy_", copy);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("record_stream", record_stream);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("set_.source_Storage", [](Tensor &self, at::Storage source) -> Tensor & { return at::native::set_(self, source); });
    m.impl("set_.source_Storage_storage_offset", set_storage);
}

// Like TORCH_LIBRARY_IMPL, which needs the key at compile time.
void register_operators()
{
    static torch::Library operators(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    static torch::Library others(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    define_operators(operators);
    others.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// ---- The module ----

void open_device(DeviceState &state, int ordinal)
{
    shoal_cu_device device;
    shoal_cu_module module;
    CU(device_get(&device, ordinal));
    CU(primary_retain(&state.context, device));
    CU(context_set(state.context));
    for (shoal_cu_stream &stream : state.pool)
        CU(stream_create(&stream, SHOAL_CU_STREAM_NON_BLOCKING, 0));
    CU(module_load(&module, MOCK_CUDA_IMAGE "strided\n"));
    CU(module_function(&state.strided, module, "strided"));
}

// Loads the driver in this process, with the modes of $MOCK_CUDA. Communicators created later find it.
void open(const std::string &path)
{
    int count;
    mock_client_open(path.c_str(), false);
    control.set_kernels_of(kernels, 1);
    CU(init(0));
    CU(device_count(&count));
    devices.resize(count);
    for (int i = 0; i < count; i++)
        open_device(devices[i], i);
    c10::SetAllocator(kType, &memory);
    register_hooks();
    register_operators();
}

std::string faults()
{
    char text[256];
    return control.faults_of(text, sizeof text) ? text : "";
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("open", &open);
    module.def("faults", &faults, "The last fault since the last call of this, or an empty text.");
    module.def("current_device", [] { return current_index; });
    module.def("set_device", [](DeviceIndex index) { current_index = index; });
    module.def("device_count", [] { return devices.size(); });
    module.def("current_stream", [](DeviceIndex index) { return current(index); });
    module.def("set_stream", [](const c10::Stream &stream) { Guard().exchangeStream(stream); });
    module.def(
        "synchronize", [](DeviceIndex index) { Guard().synchronizeDevice(index); },
        pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("count", [](const char *what) { return control.count_of(what); });
    module.def(
        "hold", [](bool is_held) { control.hold_of(is_held); }, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def(
        "step", [](unsigned parts) { return control.step_of(parts); }, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("fail", [](const std::string &name, int nth, int result) {
        control.fail_of((new std::string(name))->c_str(), nth, result); // the driver keeps the pointer
    });
    module.def("capture", [](const c10::Stream &stream, bool is_on) {
        control.capture_of(handle(stream), is_on ? SHOAL_CU_CAPTURE_ACTIVE : SHOAL_CU_CAPTURE_NONE);
    });
}
