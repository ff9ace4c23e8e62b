// Shoal as a back-end of torch.distributed: a c10d::Backend over the C library's public header.
//
// It maps types, keeps tensors alive, completes works and writes error texts; everything else is shoal.h's. Compiled against the
// user's torch by _compile.py; overrides only what torch 2.4 has, and what later versions added is declared without `override`.
//
// Threads. Every method may be called from any thread. No lock of the library is ever waited for while the GIL is held, as the
// thread that drives may free tensors that belong to Python. Callbacks of futures may wait for other works, so they never
// run on the driving thread: see Completer.
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include <shoal/shoal.h>

namespace {

using at::Tensor;
using std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
template <class T>
using Ref = c10::intrusive_ptr<T>;

// ---- Python -------------------------------------------------------------------------------------------------------------

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

// ---- The process --------------------------------------------------------------------------------------------------------

std::string failure_text(const shoal_context *context, const shoal_comm *comm, shoal_status status)
{
    shoal_failure failure = SHOAL_FAILURE_INIT;
    if (shoal_last_failure(context, comm, &failure) == SHOAL_OK && failure.text[0])
        return failure.text;
    return shoal_status_text(status);
}

// A process has one context for all groups. It lives until the process ends; a forked child makes its own.
shoal_context *process_context()
{
    static std::mutex mutex;
    static pid_t owner;
    static shoal_context *context;
    std::lock_guard<std::mutex> lock(mutex);
    if (owner == getpid())
        return context;
    shoal_context *made;
    const shoal_status status = shoal_context_create(nullptr, &made);
    TORCH_CHECK_WITH(DistBackendError, status == SHOAL_OK, "shoal: cannot begin: ", shoal_status_text(status),
                     " (the reason is on stderr)");
    owner = getpid();
    return context = made;
}

// Bytes in memory that the host's other ranks map. Freed with the last tensor that views it.
Tensor shared_bytes(int64_t bytes)
{
    WithoutGil released;
    TORCH_CHECK_VALUE(bytes >= 0, "shoal: a tensor of ", bytes, " bytes");
    shoal_context *context = process_context();
    void *memory;
    const shoal_status status = shoal_mem_alloc(context, std::max<size_t>(static_cast<size_t>(bytes), 1), &memory);
    TORCH_CHECK_WITH(OutOfMemoryError, status == SHOAL_OK, "shoal: ", failure_text(context, nullptr, status));
    const auto release = [context, owner = getpid()](void *at) {
        WithoutGil inner;
        if (owner == getpid() && shoal_mem_free(context, at) != SHOAL_OK)
            TORCH_WARN("shoal: a tensor's memory could not be freed: ", failure_text(context, nullptr, SHOAL_ERR_ARGUMENT));
    };
    return at::from_blob(memory, {bytes}, release, at::TensorOptions().dtype(at::kByte));
}

// ---- Types and operators ------------------------------------------------------------------------------------------------

std::optional<shoal_type> arithmetic_type(at::ScalarType type)
{
    switch (type) {
    case at::kFloat: return SHOAL_FLOAT32;
    case at::kDouble: return SHOAL_FLOAT64;
    case at::kBFloat16: return SHOAL_BFLOAT16;
    case at::kHalf: return SHOAL_FLOAT16;
    case at::kLong: return SHOAL_INT64;
    case at::kInt: return SHOAL_INT32;
    case at::kChar: return SHOAL_INT8;
    case at::kByte:
    case at::kBool: return SHOAL_UINT8;
    default: return std::nullopt;
    }
}

// What is moved only: the types of old, and for all others bytes in as many parts as an element has.
struct Moved {
    shoal_type type;
    size_t factor; // of the library's elements in one of torch's

    explicit Moved(at::ScalarType scalar)
    {
        const std::optional<shoal_type> same = arithmetic_type(scalar);
        type = same.value_or(SHOAL_UINT8);
        factor = same ? 1 : c10::elementSize(scalar);
    }
    size_t count(int64_t numel) const
    {
        return static_cast<size_t>(numel) * factor;
    }
};

struct Reduced {
    shoal_type type;
    shoal_op op;
    double scale = 1;
};

shoal_op operator_of(c10d::ReduceOp::RedOpType op)
{
    switch (op) {
    case c10d::ReduceOp::SUM: return SHOAL_SUM;
    case c10d::ReduceOp::AVG: return SHOAL_AVG;
    case c10d::ReduceOp::PRODUCT: return SHOAL_PROD;
    case c10d::ReduceOp::MIN: return SHOAL_MIN;
    case c10d::ReduceOp::MAX: return SHOAL_MAX;
    case c10d::ReduceOp::BAND: return SHOAL_BITAND;
    case c10d::ReduceOp::BOR: return SHOAL_BITOR;
    case c10d::ReduceOp::BXOR: return SHOAL_BITXOR;
    case c10d::ReduceOp::PREMUL_SUM: return SHOAL_SCALED_SUM;
    default: C10_THROW_ERROR(ValueError, "shoal: this is no operator of a reduction");
    }
}

// A truth value is a byte of 0 or 1: a sum of such is "or", a product "and".
shoal_op truth_operator(shoal_op op)
{
    switch (op) {
    case SHOAL_SUM: return SHOAL_MAX;
    case SHOAL_PROD: return SHOAL_MIN;
    case SHOAL_AVG:
    case SHOAL_SCALED_SUM: C10_THROW_ERROR(TypeError, "shoal: bool tensors have no average and no scaled sum");
    default: return op;
    }
}

Reduced reduction(at::ScalarType scalar, const c10d::ReduceOp &op)
{
    const std::optional<shoal_type> type = arithmetic_type(scalar);
    TORCH_CHECK_TYPE(type, "shoal: cannot reduce tensors of ", scalar,
                     "; float32, float64, bfloat16, float16, int64, int32, int8, uint8 and bool can be reduced");
    Reduced reduced{*type, operator_of(op)};
    if (scalar == at::kBool)
        reduced.op = truth_operator(reduced.op);
    TORCH_CHECK_TYPE(!at::isFloatingType(scalar) || reduced.op < SHOAL_BITAND || reduced.op == SHOAL_SCALED_SUM,
                     "shoal: the bitwise operators are for integers and bool, not for ", scalar);
    if (reduced.op == SHOAL_SCALED_SUM) {
        const auto *factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement *>(op.supplement_.get());
        TORCH_CHECK_VALUE(factor, "shoal: PREMUL_SUM comes without its factor");
        reduced.scale = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
    }
    return reduced;
}

// ---- Tensors ------------------------------------------------------------------------------------------------------------

void check_tensor(const Tensor &tensor)
{
    TORCH_CHECK_VALUE(tensor.defined(), "shoal: a tensor is not defined");
    TORCH_CHECK_VALUE(tensor.is_cpu(), "shoal: a tensor is on ", tensor.device(),
                      ", but this back-end serves CPU tensors; for both write init_process_group(\"cpu:shoal,cuda:nccl\")");
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "shoal: a tensor is sparse; only dense tensors can be sent");
}

void check_types(const Tensors &tensors, at::ScalarType type)
{
    for (const Tensor &tensor : tensors) {
        check_tensor(tensor);
        TORCH_CHECK_TYPE(tensor.scalar_type() == type, "shoal: the tensors of one call have different types, ", type, " and ",
                         tensor.scalar_type());
    }
}

const Tensor &only(const Tensors &tensors)
{
    TORCH_CHECK_VALUE(tensors.size() == 1, "shoal: one tensor is wanted here, not ", tensors.size());
    check_tensor(tensors[0]);
    return tensors[0];
}

// Whether memory holds the elements as they are, in their order.
bool is_plain(const Tensor &tensor)
{
    return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Tensor plain(const Tensor &tensor)
{
    return tensor.resolve_conj().resolve_neg().contiguous();
}

// Whether tensors lie one behind another; those without elements lie anywhere.
bool is_row(const Tensors &tensors)
{
    const char *at = nullptr;
    for (const Tensor &tensor : tensors) {
        if (!tensor.numel())
            continue;
        if (!is_plain(tensor) || (at && tensor.data_ptr() != at))
            return false;
        at = static_cast<const char *>(tensor.data_ptr()) + tensor.nbytes();
    }
    return true;
}

int64_t sum_of_lengths(const Tensors &tensors)
{
    int64_t sum = 0;
    for (const Tensor &tensor : tensors)
        sum += tensor.numel();
    return sum;
}

bool are_equal_lengths(const Tensors &tensors)
{
    return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor &t) { return t.numel() == tensors[0].numel(); });
}

// The operands of one call: memory in the order that the library wants, whatever the tensors are like. Where they are not so,
// copies serve; bring_back writes to the tensors what arrived in copies.
class Operands {
  public:
    void *input(const Tensor &tensor)
    {
        return keep(plain(tensor));
    }
    void *input(const Tensors &tensors)
    {
        return is_row(tensors) ? keep(tensors) : keep(flat(tensors, true));
    }
    void *output(const Tensor &tensor, bool has_contents = false)
    {
        outputs.push_back(tensor);
        if (is_plain(tensor))
            return keep(tensor);
        const Tensor copy = has_contents ? plain(tensor) : at::empty(tensor.sizes(), tensor.options());
        copies_.emplace_back(Tensors{tensor}, copy);
        return keep(copy);
    }
    void *output(const Tensors &tensors)
    {
        outputs.insert(outputs.end(), tensors.begin(), tensors.end());
        if (is_row(tensors))
            return keep(tensors);
        const Tensor copy = flat(tensors, false);
        copies_.emplace_back(tensors, copy);
        return keep(copy);
    }

    void bring_back()
    {
        c10::InferenceMode inference; // no gradients, and tensors of inference may be written to
        for (const auto &[tensors, copy] : copies_) {
            const Tensor row = copy.view(-1);
            int64_t at = 0;
            for (const Tensor &tensor : tensors) {
                tensor.copy_(row.narrow(0, at, tensor.numel()).view(tensor.sizes()));
                at += tensor.numel();
            }
        }
    }
    // What the library may touch may go; what the caller asked for stays.
    void let_go()
    {
        alive_.clear();
        copies_.clear();
    }

    Tensors outputs;

  private:
    void *keep(const Tensor &tensor)
    {
        alive_.push_back(tensor);
        return tensor.data_ptr();
    }
    void *keep(const Tensors &tensors)
    {
        alive_.insert(alive_.end(), tensors.begin(), tensors.end());
        const auto first = std::find_if(tensors.begin(), tensors.end(), [](const Tensor &tensor) { return tensor.numel() > 0; });
        return first == tensors.end() ? nullptr : first->data_ptr();
    }
    static Tensor flat(const Tensors &tensors, bool has_contents)
    {
        at::NoGradGuard no_grad;
        const Tensor row = at::empty({sum_of_lengths(tensors)}, tensors[0].options());
        int64_t at = 0;
        for (const Tensor &tensor : tensors) {
            if (has_contents)
                row.narrow(0, at, tensor.numel()).copy_(tensor.reshape(-1));
            at += tensor.numel();
        }
        return row;
    }

    Tensors alive_;
    std::vector<std::pair<Tensors, Tensor>> copies_;
};

// ---- A group's communicator ---------------------------------------------------------------------------------------------

class Communicator {
  public:
    Communicator(shoal_comm *comm, std::string name, std::vector<int64_t> ranks)
        : comm_(comm), name_(std::move(name)), ranks_(std::move(ranks)), owner_(getpid())
    {
    }
    Communicator(const Communicator &) = delete;
    Communicator &operator=(const Communicator &) = delete;
    ~Communicator()
    {
        close();
    }

    // The library frees a communicator only when no call is inside: calls share the lock.
    template <class Call>
    auto with(Call call)
    {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        TORCH_CHECK_WITH(DistBackendError, comm_, "shoal: group ", name_, " was destroyed");
        return call(comm_);
    }

    void close()
    {
        if (owner_ != getpid()) // a forked child, which may have inherited the lock from a thread that it has not
            return;
        WithoutGil released;
        std::unique_lock<std::shared_mutex> lock(mutex_);
        if (comm_) {
            last_text_ = failure_text(nullptr, comm_, SHOAL_ERR_STATE);
            shoal_comm_free(comm_);
        }
        comm_ = nullptr;
    }

    // Not under the lock: who is inside a call is to be woken.
    void abort()
    {
        WithoutGil released;
        std::shared_lock<std::shared_mutex> lock(mutex_);
        if (comm_)
            shoal_comm_abort(comm_);
    }

    std::string explain(shoal_status status)
    {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        if (!comm_)
            return c10::str("group ", name_, " was destroyed: ", last_text_);
        shoal_failure failure = SHOAL_FAILURE_INIT;
        if (status == SHOAL_ERR_ARGUMENT || shoal_last_failure(nullptr, comm_, &failure) != SHOAL_OK)
            return failure_text(process_context(), nullptr, status);
        return failure.text + place_in_job(failure.rank);
    }

    // Ranks of the group as ranks of the job.
    std::vector<int64_t> ranks_of(const std::vector<int> &own) const
    {
        std::vector<int64_t> ranks;
        for (const int rank : own)
            ranks.push_back(static_cast<size_t>(rank) < ranks_.size() ? ranks_[rank] : rank);
        return ranks;
    }

  private:
    // Ranks in a group's messages are the group's own.
    std::string place_in_job(int rank) const
    {
        if (rank < 0 || static_cast<size_t>(rank) >= ranks_.size() || ranks_[rank] == rank)
            return "";
        return c10::str(" (rank ", rank, " of group ", name_, " is rank ", ranks_[rank], " of the job)");
    }

    std::shared_mutex mutex_;
    shoal_comm *comm_;
    const std::string name_;
    const std::vector<int64_t> ranks_;
    const pid_t owner_;
    std::string last_text_;
};

// Programs look for these words in what a back-end throws.
const char *timed_out(shoal_status status)
{
    return status == SHOAL_ERR_TIMEOUT ? "timed out: " : "";
}

[[noreturn]] void throw_status(Communicator &group, const char *title, shoal_status status)
{
    const std::string text = c10::str(title, ": ", timed_out(status), group.explain(status));
    if (status == SHOAL_ERR_ARGUMENT)
        C10_THROW_ERROR(ValueError, text);
    C10_THROW_ERROR(DistBackendError, text);
}

// ---- Completion ---------------------------------------------------------------------------------------------------------

// Runs what completes futures, on threads of its own: their callbacks may be long, may want the GIL, and may wait for other
// works whose futures are completed here, so there is always one more thread than are busy.
class Completer {
  public:
    // The process's. A forked child has none of its parent's threads, and may have its locks: it begins anew.
    static Completer &instance()
    {
        static std::atomic<Completer *> current{nullptr};
        Completer *completer = current.load();
        if (!completer || completer->owner_ != getpid()) {
            auto *made = new Completer; // never destroyed: its threads may run until the process ends
            if (current.compare_exchange_strong(completer, made))
                completer = made;
            else
                delete made;
        }
        return *completer;
    }

    // Sees to it that there is a thread; may throw.
    void prepare()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!threads_)
            start();
    }

    // After finish, a task is not run, and what it holds is never freed: Python ends.
    void push(std::function<void()> task)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_finished_) {
            (void)new std::function<void()>(std::move(task));
            return;
        }
        tasks_.push_back(std::move(task));
        try {
            if (tasks_.size() > idle_)
                start();
        } catch (const std::system_error &) { // no more threads are to be had: one that is busy comes to it later
        }
        wake_.notify_one();
    }

    // Before Python ends: a thread of ours that came back to it afterwards would end the process badly. Waits for what runs.
    void finish()
    {
        WithoutGil released;
        std::unique_lock<std::mutex> lock(mutex_);
        is_finished_ = true;
        done_.wait_for(lock, kFinish, [this] { return busy_ == 0 && tasks_.empty(); });
    }

  private:
    void start()
    {
        std::thread([this] { serve(); }).detach();
        threads_++;
    }

    void serve()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            idle_++;
            wake_.wait(lock, [this] { return !tasks_.empty(); });
            idle_--;
            std::function<void()> task = std::move(tasks_.front());
            tasks_.pop_front();
            busy_++;
            lock.unlock();
            run(std::move(task));
            lock.lock();
            busy_--;
            done_.notify_all();
        }
    }

    // The task, and what it holds, is gone when this returns.
    static void run(std::function<void()> task)
    {
        task();
    }

    static constexpr std::chrono::seconds kFinish{5};
    const pid_t owner_ = getpid();
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<std::function<void()>> tasks_;
    size_t threads_ = 0, idle_ = 0, busy_ = 0;
    bool is_finished_ = false;
};

// What a work and the end of its request share. Outlives a work that is dropped before its request is done.
struct Outcome {
    std::shared_ptr<Communicator> group;
    const char *title;
    Operands operands;
    std::once_flag once;
    std::exception_ptr error;
    std::function<void()> profile_end;
    Ref<c10::ivalue::Future> future;

    // Once, on whichever thread learns of the end first; the others wait for it.
    void settle(shoal_status status)
    {
        WithoutGil released; // another thread may be at it, and want the GIL
        std::call_once(once, [&] {
            try {
                if (status != SHOAL_OK)
                    throw_status(*group, title, status);
                operands.bring_back();
            } catch (...) {
                error = std::current_exception();
            }
            operands.let_go();
            if (profile_end)
                profile_end();
        });
    }

    void complete_future()
    {
        if (error)
            future->setErrorIfNeeded(error);
        else
            future->markCompleted(c10::IValue(operands.outputs));
    }
};

// On the driving thread, which frees nothing: tensors may be Python's.
void when_done(void *arg, shoal_status status)
{
    auto *held = static_cast<std::shared_ptr<Outcome> *>(arg);
    Completer::instance().push([held, status] {
        const std::unique_ptr<std::shared_ptr<Outcome>> outcome(held);
        (*outcome)->settle(status);
        if ((*outcome)->future)
            (*outcome)->complete_future();
    });
}

class ShoalWork : public c10d::Work {
  public:
    // Made before its operation is posted, as a profile counts from here on; then posted() follows. inputs: what a profile
    // shows the shapes of; they are copied only where one is taken.
    ShoalWork(int rank, c10d::OpType type, std::shared_ptr<Outcome> outcome, at::TensorList inputs)
        : Work(rank, type, outcome->title, at::hasCallbacks() ? std::optional<Tensors>(inputs.vec()) : std::nullopt),
          outcome_(std::move(outcome))
    {
        outcome_->profile_end = std::move(recordFunctionEndCallback_);
        recordFunctionEndCallback_ = nullptr;
    }

    // NULL: it is done.
    void posted(shoal_request *request)
    {
        request_ = request;
        is_posted_ = true;
    }

    ~ShoalWork() override
    {
        if (!is_posted_) {
            if (outcome_->profile_end)
                outcome_->profile_end();
            return;
        }
        WithoutGil released;
        const shoal_status status = shoal_request_test(request_);
        if (status == SHOAL_PENDING)
            keep(); // the tensors
        else if (status == SHOAL_OK)
            outcome_->settle(status); // copies are brought back, whoever asked for it
        shoal_request_free(request_);
    }

    bool isCompleted() override
    {
        WithoutGil released;
        const shoal_status status = shoal_request_test(request_);
        if (status == SHOAL_PENDING)
            return false;
        outcome_->settle(status);
        return true;
    }

    bool isSuccess() const override
    {
        return const_cast<ShoalWork *>(this)->isCompleted() && !outcome_->error;
    }

    std::exception_ptr exception() const override
    {
        return const_cast<ShoalWork *>(this)->isCompleted() ? outcome_->error : nullptr;
    }

    Tensors result() override
    {
        return outcome_->operands.outputs;
    }

    void synchronize() override
    {
        wait(kNoTimeout);
    }

    bool wait(milliseconds timeout) override
    {
        return wait_on(timeout, false);
    }

    // has_waited: a slice has passed already, and a signal may be there.
    bool wait_on(milliseconds timeout, bool has_waited)
    {
        WithoutGil released;
        shoal_status status;
        milliseconds left = timeout > kNoTimeout ? timeout : milliseconds::max();
        for (;;) {
            const milliseconds slice = std::min(left, kSlice);
            if (has_waited && shoal_request_test(request_) == SHOAL_PENDING)
                raise_signals();
            status = shoal_request_wait(request_, static_cast<uint32_t>(slice.count()));
            if (status != SHOAL_PENDING)
                break;
            has_waited = true;
            left -= slice;
            TORCH_CHECK_WITH(DistBackendError, left.count() > 0, outcome_->title, ": this wait timed out after ",
                             timeout.count(), " ms; nothing is lost, it may be waited for again");
        }
        outcome_->settle(status);
        if (outcome_->error)
            std::rethrow_exception(outcome_->error);
        return true;
    }

    void abort() override
    {
        outcome_->group->abort();
    }

    Ref<c10::ivalue::Future> getFuture() override
    {
        WithoutGil released;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (outcome_->future)
                return outcome_->future;
            outcome_->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
        }
        if (isCompleted())
            outcome_->complete_future();
        else
            listen();
        return outcome_->future;
    }

  private:
    void keep()
    {
        try {
            listen();
        } catch (const std::system_error &) { // no thread is to be had; nobody will know when they can be freed
            (void)new std::shared_ptr<Outcome>(outcome_);
        }
    }

    void listen()
    {
        Completer::instance().prepare();
        if (is_listening_.exchange(true))
            return;
        shoal_request_on_done(request_, when_done, new std::shared_ptr<Outcome>(outcome_));
    }

    const std::shared_ptr<Outcome> outcome_;
    shoal_request *request_ = nullptr;
    bool is_posted_ = false;
    std::atomic<bool> is_listening_{false};
};

// ---- The back-end -------------------------------------------------------------------------------------------------------

// torch 2.4 has asyncOp in some structs of options, later versions in all. Without it nobody knows: a work is waited for.
template <class Options, class = void>
struct HasAsync : std::false_type {
};
template <class Options>
struct HasAsync<Options, std::void_t<decltype(std::declval<Options>().asyncOp)>> : std::true_type {
};

template <class Options>
bool is_async(const Options &options)
{
    if constexpr (HasAsync<Options>::value)
        return options.asyncOp;
    else
        return true;
}

uint32_t deadline_ms(milliseconds timeout)
{
    return static_cast<uint32_t>(std::clamp<int64_t>(timeout.count(), 1, UINT32_MAX - 1));
}

// Elements in each rank's part of a tensor that is cut along its first dimension; empty splits: into equal parts.
std::vector<size_t> split_counts(const Tensor &tensor, const std::vector<int64_t> &splits, int size, size_t factor)
{
    const int64_t rows = tensor.dim() ? tensor.size(0) : 1;
    if (splits.empty()) {
        TORCH_CHECK_VALUE(rows % size == 0, "shoal: a tensor of ", rows, " rows cannot be cut into ", size, " equal parts");
        return std::vector<size_t>(size, tensor.numel() / size * factor);
    }
    TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == size, "shoal: ", splits.size(), " splits for ", size, " ranks");
    const int64_t row = rows ? tensor.numel() / rows : 0;
    std::vector<size_t> counts;
    int64_t sum = 0;
    for (const int64_t split : splits) {
        TORCH_CHECK_VALUE(split >= 0, "shoal: a split of ", split, " rows");
        counts.push_back(static_cast<size_t>(split * row) * factor);
        sum += split;
    }
    TORCH_CHECK_VALUE(sum == rows, "shoal: the splits add up to ", sum, " rows, but the tensor has ", rows);
    return counts;
}

std::vector<size_t> lengths(const Tensors &tensors, size_t factor)
{
    std::vector<size_t> counts;
    for (const Tensor &tensor : tensors)
        counts.push_back(static_cast<size_t>(tensor.numel()) * factor);
    return counts;
}

Ref<c10d::Backend> create(const Ref<c10d::Store> &store, int rank, int size, milliseconds timeout, const std::string &name,
                          std::vector<int64_t> ranks);

class ShoalBackend : public c10d::Backend {
  public:
    ShoalBackend(std::shared_ptr<Communicator> group, int rank, int size, milliseconds timeout)
        : Backend(rank, size), group_(std::move(group)), timeout_(timeout)
    {
    }

    const std::string getBackendName() const override
    {
        return "shoal";
    }

    // ---- collectives ----

    Ref<c10d::Work> broadcast(Tensors &tensors, const c10d::BroadcastOptions &o) override
    {
        const Tensor &tensor = only(tensors);
        const Moved moved(tensor.scalar_type());
        Operands operands;
        void *memory = operands.output(tensor, o.rootRank == rank_);
        return start(c10d::OpType::BROADCAST, "shoal:broadcast", tensors, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_broadcast_post(comm, memory, memory, moved.count(tensor.numel()), moved.type,
                                                     root(o.rootRank), options, out);
                     });
    }

    Ref<c10d::Work> allreduce(Tensors &tensors, const c10d::AllreduceOptions &o) override
    {
        const Tensor &tensor = only(tensors);
        const Reduced reduced = reduction(tensor.scalar_type(), o.reduceOp);
        Operands operands;
        void *memory = operands.output(tensor, true);
        return start(c10d::OpType::ALLREDUCE, "shoal:all_reduce", tensors, o, std::move(operands), reduced.scale,
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_allreduce_post(comm, memory, memory, count(tensor), reduced.type, reduced.op, options,
                                                     out);
                     });
    }

    Ref<c10d::Work> allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &o) override
    {
        TORCH_CHECK_VALUE(!tensors.empty(), "shoal: no tensors to reduce");
        check_types(tensors, tensors[0].scalar_type());
        const Reduced reduced = reduction(tensors[0].scalar_type(), o.reduceOp);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (const Tensor &tensor : tensors) {
            void *memory = operands.output(tensor, true);
            parts.push_back({memory, memory, count(tensor)});
        }
        return start(c10d::OpType::COALESCED, "shoal:all_reduce_coalesced", tensors, o, std::move(operands), reduced.scale,
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_allreduce_coalesced_post(comm, parts.data(), parts.size(), reduced.type, reduced.op,
                                                               options, out);
                     });
    }

    Ref<c10d::Work> reduce(Tensors &tensors, const c10d::ReduceOptions &o) override
    {
        const Tensor &tensor = only(tensors);
        const Reduced reduced = reduction(tensor.scalar_type(), o.reduceOp);
        const bool is_root = o.rootRank == rank_;
        Operands operands;
        void *memory = is_root ? operands.output(tensor, true) : operands.input(tensor);
        if (!is_root)
            operands.outputs.push_back(tensor);
        return start(c10d::OpType::REDUCE, "shoal:reduce", tensors, o, std::move(operands), reduced.scale,
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_reduce_post(comm, memory, is_root ? memory : nullptr, count(tensor), reduced.type,
                                                  reduced.op, root(o.rootRank), options, out);
                     });
    }

    Ref<c10d::Work> allgather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &o) override
    {
        TORCH_CHECK_VALUE(outputs.size() == 1, "shoal: one list of outputs is wanted here, not ", outputs.size());
        const Tensor &input = only(inputs);
        const Tensors &parts = outputs[0];
        check_parts(parts, input.scalar_type());
        TORCH_CHECK_VALUE(parts[rank_].numel() == input.numel(), "shoal: the input has ", input.numel(),
                          " elements, but this rank's part of the output ", parts[rank_].numel());
        const Moved moved(input.scalar_type());
        const std::vector<size_t> counts = lengths(parts, moved.factor);
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(parts);
        return start(c10d::OpType::ALLGATHER, "shoal:all_gather", inputs, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         if (are_equal_lengths(parts))
                             return shoal_allgather_post(comm, source, dest, counts[0], moved.type, options, out);
                         return shoal_allgatherv_post(comm, source, dest, counts.data(), nullptr, moved.type, options, out);
                     });
    }

    Ref<c10d::Work> _allgather_base(Tensor &output, Tensor &input, const c10d::AllgatherOptions &o) override
    {
        check_gathered(output, input);
        const Moved moved(input.scalar_type());
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(output);
        return start(c10d::OpType::_ALLGATHER_BASE, "shoal:all_gather_into_tensor", input, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_allgather_post(comm, source, dest, moved.count(input.numel()), moved.type, options, out);
                     });
    }

    Ref<c10d::Work> allgather_coalesced(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::AllgatherOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty() && static_cast<int>(outputs.size()) == size_, "shoal: ", outputs.size(),
                          " lists of outputs of ", inputs.size(), " inputs for ", size_, " ranks");
        for (const Tensors &list : outputs)
            TORCH_CHECK_VALUE(list.size() == inputs.size(), "shoal: a list of ", list.size(), " outputs for ", inputs.size(),
                              " inputs");
        std::vector<Tensors> rows(inputs.size());
        for (size_t i = 0; i < inputs.size(); i++) {
            check_tensor(inputs[i]);
            for (const Tensors &list : outputs)
                rows[i].push_back(list[i]);
            check_parts(rows[i], inputs[i].scalar_type());
            check_equal(rows[i], inputs[i]);
        }
        if (inputs.size() == 1) // the call that both shims make of it
            return allgather(rows, inputs, o);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (size_t i = 0; i < inputs.size(); i++) // as bytes: they may have different types
            parts.push_back({operands.input(inputs[i]), operands.output(rows[i]), inputs[i].nbytes()});
        operands.outputs.clear(); // in the caller's order
        for (const Tensors &list : outputs)
            operands.outputs.insert(operands.outputs.end(), list.begin(), list.end());
        return gather_each("shoal:all_gather_coalesced", inputs, o, std::move(operands), parts);
    }

    Ref<c10d::Work> allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs, const c10d::AllgatherOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "shoal: ", outputs.size(), " outputs for ",
                          inputs.size(), " inputs");
        if (inputs.size() == 1) // the call that both shims make of it
            return _allgather_base(outputs[0], inputs[0], o);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (size_t i = 0; i < inputs.size(); i++) { // as bytes: they may have different types
            check_gathered(outputs[i], inputs[i]);
            parts.push_back({operands.input(inputs[i]), operands.output(outputs[i]), inputs[i].nbytes()});
        }
        return gather_each("shoal:all_gather_into_tensor_coalesced", inputs, o, std::move(operands), parts);
    }

    Ref<c10d::Work> gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &o) override
    {
        const Tensor &input = only(inputs);
        const Moved moved(input.scalar_type());
        Operands operands;
        void *source = operands.input(input), *dest = nullptr;
        if (o.rootRank == rank_) {
            TORCH_CHECK_VALUE(outputs.size() == 1, "shoal: the root needs one list of outputs, not ", outputs.size());
            check_parts(outputs[0], input.scalar_type());
            check_equal(outputs[0], input);
            dest = operands.output(outputs[0]);
        } else {
            TORCH_CHECK_VALUE(outputs.empty() || outputs[0].empty(), "shoal: only the root, rank ", o.rootRank, ", has outputs");
        }
        return start(c10d::OpType::GATHER, "shoal:gather", inputs, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_gather_post(comm, source, dest, moved.count(input.numel()), moved.type, root(o.rootRank),
                                                  options, out);
                     });
    }

    Ref<c10d::Work> scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ScatterOptions &o) override
    {
        const Tensor &output = only(outputs);
        const Moved moved(output.scalar_type());
        Operands operands;
        void *dest = operands.output(output), *source = nullptr;
        if (o.rootRank == rank_) {
            TORCH_CHECK_VALUE(inputs.size() == 1, "shoal: the root needs one list of inputs, not ", inputs.size());
            check_parts(inputs[0], output.scalar_type());
            check_equal(inputs[0], output);
            source = operands.input(inputs[0]);
        } else {
            TORCH_CHECK_VALUE(inputs.empty() || inputs[0].empty(), "shoal: only the root, rank ", o.rootRank, ", has inputs");
        }
        return start(c10d::OpType::SCATTER, "shoal:scatter", o.rootRank == rank_ ? at::TensorList(inputs[0]) : at::TensorList(),
                     o, std::move(operands), [&](auto *comm, auto *options, auto *out) {
                         return shoal_scatter_post(comm, source, dest, moved.count(output.numel()), moved.type,
                                                   root(o.rootRank), options, out);
                     });
    }

    Ref<c10d::Work> reduce_scatter(Tensors &outputs, std::vector<Tensors> &inputs, const c10d::ReduceScatterOptions &o) override
    {
        TORCH_CHECK_VALUE(inputs.size() == 1, "shoal: one list of inputs is wanted here, not ", inputs.size());
        const Tensor &output = only(outputs);
        const Tensors &parts = inputs[0];
        check_parts(parts, output.scalar_type());
        TORCH_CHECK_VALUE(parts[rank_].numel() == output.numel(), "shoal: the output has ", output.numel(),
                          " elements, but this rank's part of the input ", parts[rank_].numel());
        const Reduced reduced = reduction(output.scalar_type(), o.reduceOp);
        const std::vector<size_t> counts = lengths(parts, 1);
        Operands operands;
        void *source = operands.input(parts), *dest = operands.output(output);
        return start(
            c10d::OpType::REDUCE_SCATTER, "shoal:reduce_scatter", parts, o, std::move(operands), reduced.scale,
            [&](auto *comm, auto *options, auto *out) {
                if (are_equal_lengths(parts))
                    return shoal_reduce_scatter_post(comm, source, dest, counts[0], reduced.type, reduced.op, options, out);
                return shoal_reduce_scatterv_post(comm, source, dest, counts.data(), reduced.type, reduced.op, options, out);
            });
    }

    Ref<c10d::Work> _reduce_scatter_base(Tensor &output, Tensor &input, const c10d::ReduceScatterOptions &o) override
    {
        check_gathered(input, output);
        const Reduced reduced = reduction(output.scalar_type(), o.reduceOp);
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(output);
        return start(c10d::OpType::_REDUCE_SCATTER_BASE, "shoal:reduce_scatter_tensor", input, o, std::move(operands),
                     reduced.scale, [&](auto *comm, auto *options, auto *out) {
                         return shoal_reduce_scatter_post(comm, source, dest, count(output), reduced.type, reduced.op, options,
                                                          out);
                     });
    }

    Ref<c10d::Work> reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                    const c10d::ReduceScatterOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), "shoal: ", outputs.size(), " outputs for ",
                          inputs.size(), " inputs");
        if (inputs.size() == 1)
            return _reduce_scatter_base(outputs[0], inputs[0], o);
        check_types(inputs, inputs[0].scalar_type());
        const Reduced reduced = reduction(inputs[0].scalar_type(), o.reduceOp);
        Operands operands;
        std::vector<shoal_tensor> parts;
        for (size_t i = 0; i < inputs.size(); i++) {
            check_gathered(inputs[i], outputs[i]);
            parts.push_back({operands.input(inputs[i]), operands.output(outputs[i]), count(outputs[i])});
        }
        return start(c10d::OpType::COALESCED, "shoal:reduce_scatter_tensor_coalesced", inputs, o, std::move(operands),
                     reduced.scale, [&](auto *comm, auto *options, auto *out) {
                         return shoal_reduce_scatter_coalesced_post(comm, parts.data(), parts.size(), reduced.type, reduced.op,
                                                                    options, out);
                     });
    }

    Ref<c10d::Work> alltoall_base(Tensor &output, Tensor &input, std::vector<int64_t> &output_splits,
                                  std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &o) override
    {
        check_types({output, input}, input.scalar_type());
        const Moved moved(input.scalar_type());
        const std::vector<size_t> gives = split_counts(input, input_splits, size_, moved.factor),
                                  takes = split_counts(output, output_splits, size_, moved.factor);
        Operands operands;
        void *source = operands.input(input), *dest = operands.output(output);
        return start(c10d::OpType::ALLTOALL_BASE, "shoal:all_to_all_single", input, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         // also where splits are even: other ranks may have spelt theirs out
                         return shoal_alltoallv_post(comm, source, gives.data(), nullptr, dest, takes.data(), nullptr,
                                                     moved.type, options, out);
                     });
    }

    Ref<c10d::Work> alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &o) override
    {
        TORCH_CHECK_VALUE(!inputs.empty(), "shoal: no inputs");
        check_parts(inputs, inputs[0].scalar_type());
        check_parts(outputs, inputs[0].scalar_type());
        const Moved moved(inputs[0].scalar_type());
        const std::vector<size_t> gives = lengths(inputs, moved.factor), takes = lengths(outputs, moved.factor);
        Operands operands;
        void *source = operands.input(inputs), *dest = operands.output(outputs);
        return start(c10d::OpType::ALLTOALL, "shoal:all_to_all", inputs, o, std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_alltoallv_post(comm, source, gives.data(), nullptr, dest, takes.data(), nullptr,
                                                     moved.type, options, out);
                     });
    }

    Ref<c10d::Work> barrier(const c10d::BarrierOptions &o) override
    {
        return start(c10d::OpType::BARRIER, "shoal:barrier", {}, o, Operands(),
                     [](auto *comm, auto *options, auto *out) { return shoal_barrier_post(comm, options, out); });
    }

    // The library's barrier names who is missing when its deadline passes.
    void monitoredBarrier(const c10d::BarrierOptions &o, bool) override
    {
        barrier(o)->wait(kNoTimeout);
    }

    // ---- messages ----

    Ref<c10d::Work> send(Tensors &tensors, int peer, int tag) override
    {
        const Tensor &tensor = only(tensors);
        const Moved moved(tensor.scalar_type());
        Operands operands;
        void *memory = operands.input(tensor);
        operands.outputs.push_back(tensor);
        return start(c10d::OpType::SEND, "shoal:send", tensors, Message(), std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_send_post(comm, memory, moved.count(tensor.numel()), moved.type, peer, tag, options, out);
                     });
    }

    Ref<c10d::Work> recv(Tensors &tensors, int peer, int tag) override
    {
        const Tensor &tensor = only(tensors);
        const Moved moved(tensor.scalar_type());
        Operands operands;
        void *memory = operands.output(tensor);
        return start(c10d::OpType::RECV, "shoal:recv", tensors, Message(), std::move(operands),
                     [&](auto *comm, auto *options, auto *out) {
                         return shoal_recv_post(comm, memory, moved.count(tensor.numel()), moved.type, peer, tag, options, out);
                     });
    }

    Ref<c10d::Work> recvAnysource(Tensors &, int) override
    {
        TORCH_CHECK_NOT_IMPLEMENTED(false, "shoal: a receive has to name its source; one from any rank is not served");
    }

    // ---- several calls as one work ----

    void startCoalescing() override
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        coalesced_.emplace(); // anew where the last one was never ended: torch does not end it when an exception leaves it
    }

    Ref<c10d::Work> endCoalescing() override;

    // ---- memory ----

    // DDP's buckets. DDP expects real numbers for complex gradients, twice as many, as it makes of buckets in memory of its own.
    at::Tensor allocateTensor(long size, at::TensorOptions options)
    {
        const auto type = c10::typeMetaToScalarType(options.dtype());
        if (!c10::isComplexType(type))
            return allocate(size, options);
        return allocate(2 * size, options.dtype(c10::toRealValueType(type)));
    }

    // Ordinary memory where there is no shared memory, which the library has logged.
    at::Tensor allocate(long size, at::TensorOptions options)
    {
        const auto type = c10::typeMetaToScalarType(options.dtype());
        const int64_t bytes = size * static_cast<int64_t>(c10::elementSize(type));
        if (bytes >= refused_)
            return at::empty({size}, options);
        try {
            return shared_bytes(bytes).view(type);
        } catch (const c10::OutOfMemoryError &) {
            refused_ = bytes; // and not tried again in each step
            return at::empty({size}, options);
        }
    }

    // CPUs have no number.
    bool supportsTensorAlloc(c10::DeviceIndex device)
    {
        return device < 0;
    }

    // ---- life ----

    void setTimeout(milliseconds timeout)
    {
        timeout_ = timeout;
    }

    // Over the ranks of this group that are named, in that order, who all call it; no group for the others.
    Ref<c10d::Backend> split(const Ref<c10d::Store> &store, const std::vector<int> &ranks, const Ref<Options> &options)
    {
        const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
        if (mine == ranks.end())
            return nullptr;
        const milliseconds timeout = options ? options->timeout : timeout_.load();
        return create(store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()), timeout, "split",
                      group_->ranks_of(ranks));
    }

    void abort()
    {
        group_->abort();
    }

    void shutdown()
    {
        group_->close();
    }

    void setSequenceNumberForGroup() override
    {
    }

    uint64_t getSequenceNumberForGroup() override
    {
        return sequence_;
    }

    Ref<Options> getBackendOptions()
    {
        return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
    }

  private:
    // Messages come without options; whether they will be waited for at once nobody knows.
    struct Message {
        milliseconds timeout = c10d::kUnsetTimeout;
    };

    static size_t count(const Tensor &tensor)
    {
        return static_cast<size_t>(tensor.numel());
    }

    int root(int64_t rank) const
    {
        TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "shoal: there is no rank ", rank, " in a group of ", size_);
        return static_cast<int>(rank);
    }

    void check_parts(const Tensors &parts, at::ScalarType type) const
    {
        TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == size_, "shoal: a list of ", parts.size(), " tensors for ", size_,
                          " ranks");
        check_types(parts, type);
    }

    void check_equal(const Tensors &parts, const Tensor &one) const
    {
        TORCH_CHECK_VALUE(are_equal_lengths(parts) && parts[0].numel() == one.numel(),
                          "shoal: the tensors of the list must have as many elements as this rank's, ", one.numel());
    }

    void check_gathered(const Tensor &all, const Tensor &part) const
    {
        check_types({all, part}, part.scalar_type());
        TORCH_CHECK_VALUE(all.numel() == part.numel() * size_, "shoal: the larger tensor must have ", size_,
                          " times the elements of the smaller, but has ", all.numel(), " to ", part.numel());
    }

    Ref<c10d::Work> gather_each(const char *title, at::TensorList inputs, const c10d::AllgatherOptions &o, Operands operands,
                                const std::vector<shoal_tensor> &parts)
    {
        return start(c10d::OpType::COALESCED, title, inputs, o, std::move(operands), [&](auto *comm, auto *options, auto *out) {
            return shoal_allgather_coalesced_post(comm, parts.data(), parts.size(), SHOAL_UINT8, options, out);
        });
    }

    template <class Options, class Post>
    Ref<c10d::Work> start(c10d::OpType type, const char *title, at::TensorList inputs, const Options &o, Operands operands,
                          Post post)
    {
        return start(type, title, inputs, o, std::move(operands), 1, post);
    }

    // Posts a call; waits for it where the caller would do so at once.
    template <class Options, class Post>
    Ref<c10d::Work> start(c10d::OpType type, const char *title, at::TensorList inputs, const Options &o, Operands operands,
                          double scale, Post post)
    {
        const bool waits = !is_async(o) && !is_coalescing();
        shoal_options options = SHOAL_OPTIONS_INIT;
        options.timeout_ms = deadline_ms(o.timeout.count() <= 0 ? timeout_.load() : o.timeout);
        options.wait_ms = waits ? static_cast<uint32_t>(kSlice.count()) : 0;
        options.scale = scale;
        auto outcome = std::make_shared<Outcome>();
        outcome->group = group_;
        outcome->title = title;
        outcome->operands = std::move(operands);
        WithoutGil released;
        auto work = c10::make_intrusive<ShoalWork>(rank_, type, std::move(outcome), inputs);
        shoal_request *request = nullptr;
        const shoal_status status = group_->with([&](shoal_comm *comm) { return post(comm, &options, &request); });
        if (status != SHOAL_OK)
            throw_status(*group_, title, status);
        work->posted(request);
        sequence_++;
        if (waits)
            work->wait_on(kNoTimeout, true);
        else
            collect(work);
        return work;
    }

    bool is_coalescing()
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        return coalesced_.has_value();
    }

    void collect(const Ref<c10d::Work> &work)
    {
        std::lock_guard<std::mutex> lock(coalescing_mutex_);
        if (coalesced_)
            coalesced_->push_back(work);
    }

    const std::shared_ptr<Communicator> group_;
    std::atomic<milliseconds> timeout_;
    std::atomic<uint64_t> sequence_{0};
    std::atomic<int64_t> refused_{std::numeric_limits<int64_t>::max()};
    std::mutex coalescing_mutex_;
    std::optional<std::vector<Ref<c10d::Work>>> coalesced_;
};

// The works between startCoalescing and endCoalescing, as one.
class JointWork : public c10d::Work {
  public:
    JointWork(int rank, std::vector<Ref<c10d::Work>> works) : Work(rank, c10d::OpType::COALESCED), works_(std::move(works))
    {
    }

    bool isCompleted() override
    {
        return std::all_of(works_.begin(), works_.end(), [](const auto &work) { return work->isCompleted(); });
    }

    bool isSuccess() const override
    {
        return std::all_of(works_.begin(), works_.end(), [](const auto &work) { return work->isSuccess(); });
    }

    std::exception_ptr exception() const override
    {
        for (const auto &work : works_)
            if (std::exception_ptr error = work->exception())
                return error;
        return nullptr;
    }

    bool wait(milliseconds timeout) override
    {
        const auto until = std::chrono::steady_clock::now() + timeout;
        for (const auto &work : works_) {
            const auto left = std::chrono::duration_cast<milliseconds>(until - std::chrono::steady_clock::now());
            work->wait(timeout > kNoTimeout ? std::max(left, milliseconds(1)) : timeout);
        }
        return true;
    }

    Tensors result() override
    {
        return outputs_of(works_);
    }

    void synchronize() override
    {
        wait(kNoTimeout);
    }

    // Of the outputs of all works, in their order.
    Ref<c10::ivalue::Future> getFuture() override
    {
        const auto type = c10::ListType::create(c10::TensorType::get());
        c10::List<Ref<c10::ivalue::Future>> futures(c10::FutureType::create(type));
        for (const auto &work : works_)
            futures.push_back(work->getFuture());
        const auto value_of = [works = works_](c10::ivalue::Future &all) {
            all.value(); // throws what one of them failed with
            return c10::IValue(outputs_of(works));
        };
        return c10::collectAll(futures)->then(value_of, type);
    }

  private:
    static Tensors outputs_of(const std::vector<Ref<c10d::Work>> &works)
    {
        Tensors outputs;
        for (const auto &work : works)
            for (const Tensor &output : work->result())
                outputs.push_back(output);
        return outputs;
    }

    const std::vector<Ref<c10d::Work>> works_;
};

Ref<c10d::Work> ShoalBackend::endCoalescing()
{
    std::lock_guard<std::mutex> lock(coalescing_mutex_);
    TORCH_CHECK_VALUE(coalesced_, "shoal: coalescing has not begun");
    auto work = c10::make_intrusive<JointWork>(rank_, std::move(*coalesced_));
    coalesced_.reset();
    return work;
}

// ---- Making a group -----------------------------------------------------------------------------------------------------

// torch's store as the library wants it: set, get with a deadline, erase. torch may hand out the same store again for a later
// group (a group destroyed and made anew under torchrun): each rank counts its own joins, and keys carry the number.
class Rendezvous {
  public:
    Rendezvous(Ref<c10d::Store> store, int rank)
        : store_(std::move(store)), prefix_(c10::str(store_->add(c10::str("shoal joins ", rank), 1), "/"))
    {
    }

    shoal_store callbacks()
    {
        return {set, get, erase, this};
    }

    // A handler of a signal raised while ranks were waited for.
    void rethrow() const
    {
        if (interruption_)
            std::rethrow_exception(interruption_);
    }

  private:
    static int set(void *self, const char *key, const void *value, size_t bytes)
    {
        const auto *at = static_cast<const uint8_t *>(value);
        return guarded(self, -2, [&](Rendezvous &r) {
            r.store_->set(r.prefix_ + key, std::vector<uint8_t>(at, at + bytes));
            return 0;
        });
    }

    // A store's own wait cannot be left on a signal, and not in all versions without spoiling the store's connection.
    static long get(void *self, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
    {
        return guarded(self, -2L, [&](Rendezvous &r) {
            const auto until = std::chrono::steady_clock::now() + milliseconds(timeout_ms);
            std::chrono::microseconds pause{50};
            while (!r.store_->check({r.prefix_ + key})) {
                if (std::chrono::steady_clock::now() >= until)
                    return -1L;
                raise_signals();
                std::this_thread::sleep_for(pause);
                pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(20));
            }
            const std::vector<uint8_t> found = r.store_->get(r.prefix_ + key);
            std::copy_n(found.begin(), std::min(found.size(), capacity), static_cast<uint8_t *>(value));
            return static_cast<long>(found.size());
        });
    }

    static int erase(void *self, const char *key)
    {
        return guarded(self, -2, [&](Rendezvous &r) {
            r.store_->deleteKey(r.prefix_ + key);
            return 0;
        });
    }

    template <class Result, class Call>
    static Result guarded(void *self, Result failed, Call call)
    {
        auto &rendezvous = *static_cast<Rendezvous *>(self);
        try {
            return call(rendezvous);
        } catch (pybind11::error_already_set &) {
            rendezvous.interruption_ = std::current_exception();
        } catch (const std::exception &error) {
            TORCH_WARN("shoal: the store failed: ", error.what());
        }
        return failed;
    }

    const Ref<c10d::Store> store_;
    const std::string prefix_;
    std::exception_ptr interruption_;
};

Ref<c10d::Backend> create(const Ref<c10d::Store> &store, int rank, int size, milliseconds timeout, const std::string &name,
                          std::vector<int64_t> ranks)
{
    WithoutGil released;
    shoal_context *context = process_context();
    Rendezvous rendezvous(store, rank);
    const shoal_store callbacks = rendezvous.callbacks();
    shoal_comm_options options = SHOAL_COMM_OPTIONS_INIT;
    options.name = name.c_str();
    options.timeout_ms = options.create_timeout_ms = deadline_ms(timeout);
    shoal_comm *comm = nullptr;
    const shoal_status status = shoal_comm_create_with(context, &callbacks, rank, size, &options, &comm);
    if (status != SHOAL_OK)
        rendezvous.rethrow();
    TORCH_CHECK_WITH(DistBackendError, status == SHOAL_OK, "shoal: rank ", rank, " of ", size, " cannot join group ", name,
                     ": ", timed_out(status), failure_text(context, nullptr, status));
    auto group = std::make_shared<Communicator>(comm, name, std::move(ranks));
    return c10::make_intrusive<ShoalBackend>(std::move(group), rank, size, timeout);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("create", &create, "Joins a group through torch's store; returns its back-end.", pybind11::arg("store"),
               pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("timeout"), pybind11::arg("name"),
               pybind11::arg("ranks"));
    // Python, as FSDP2, gets the type that it asks for, complex too; DDP calls allocateTensor in C++.
    pybind11::class_<ShoalBackend, c10d::Backend, Ref<ShoalBackend>>(module, "ShoalBackend")
        .def(
            "allocate_tensor",
            [](ShoalBackend &backend, long size, at::ScalarType dtype, at::Device device) {
                WithoutGil released;
                return backend.allocate(size, at::TensorOptions().dtype(dtype).device(device));
            },
            pybind11::arg("size"), pybind11::kw_only(), pybind11::arg("dtype"), pybind11::arg("device"));
    module.def("finish", [] { Completer::instance().finish(); }, "Ends the threads that complete futures; at exit.");
    module.def("empty", &shared_bytes, "A tensor of bytes that the host's other ranks map.", pybind11::arg("bytes"));
}
