// Collectives between GPUs. TRAIN_GPT_NCCL is defined where the build found NCCL's header. The
// library is loaded when a group is opened, so a machine with one GPU does not need it.
#include "base/error.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"
#include "parallel/communicator_kinds.h"

#ifdef TRAIN_GPT_NCCL
#include <atomic>
#include <cassert>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <nccl.h>

namespace train_gpt {

namespace {

/// NCCL's functions. The library stays loaded until the process ends, because it has threads.
class Library {
  public:
    Library() : handle_(::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) {
        if (!handle_)
            throw Error("training on several GPUs needs NCCL, whose library cannot be loaded: ",
                        ::dlerror(),
                        "; install it (libnccl2) or add its folder to LD_LIBRARY_PATH");
        find(get_unique_id, "ncclGetUniqueId");
        find(init_rank, "ncclCommInitRank");
        find(split, "ncclCommSplit");
        find(count, "ncclCommCount");
        find(user_rank, "ncclCommUserRank");
        find(destroy, "ncclCommDestroy");
        find(abort, "ncclCommAbort");
        find(get_async_error, "ncclCommGetAsyncError");
        find(get_error_string, "ncclGetErrorString");
        find(get_last_error, "ncclGetLastError");
        find(all_reduce, "ncclAllReduce");
        find(reduce_scatter, "ncclReduceScatter");
        find(all_gather, "ncclAllGather");
        find(broadcast, "ncclBroadcast");
        find(send, "ncclSend");
        find(receive, "ncclRecv");
    }

    decltype(&ncclGetUniqueId) get_unique_id;
    decltype(&ncclCommInitRank) init_rank;
    decltype(&ncclCommSplit) split;
    decltype(&ncclCommCount) count;
    decltype(&ncclCommUserRank) user_rank;
    decltype(&ncclCommDestroy) destroy;
    decltype(&ncclCommAbort) abort;
    decltype(&ncclCommGetAsyncError) get_async_error;
    decltype(&ncclGetErrorString) get_error_string;
    decltype(&ncclGetLastError) get_last_error;
    decltype(&ncclAllReduce) all_reduce;
    decltype(&ncclReduceScatter) reduce_scatter;
    decltype(&ncclAllGather) all_gather;
    decltype(&ncclBroadcast) broadcast;
    decltype(&ncclSend) send;
    decltype(&ncclRecv) receive;

    /// Throws Error if an operation of a group (null: not opened yet) failed.
    void check(ncclResult_t result, ncclComm_t group, const char* operation) const {
        if (result == ncclSuccess) return;
        const char* detail = get_last_error(group);
        throw Error("NCCL reports at ", operation, ": ", get_error_string(result),
                    detail && *detail ? " (" : "", detail ? detail : "",
                    detail && *detail ? ")" : "",
                    "; look for the rank that failed first, and see what NCCL_DEBUG=INFO prints");
    }

  private:
    template <class Function>
    void find(Function*& function, const char* name) {
        function = reinterpret_cast<Function*>(::dlsym(handle_, name));
        if (!function)
            throw Error("the NCCL library that was found is too old: it has no ", name,
                        "; version 2.18 is needed");
    }

    void* handle_;
};

ncclDataType_t nccl_type(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return ncclFloat32;
        case DType::bf16:
            return ncclBfloat16;
        case DType::int32:
            return ncclInt32;
        case DType::fp64:
            break;
    }
    return ncclFloat64;
}

/// A blocking communicator: a call returns when its work is in the stream, so that an event can be
/// recorded after it. With NCCL's non-blocking kind each call would have to be polled until then.
/// When a rank never comes, abort() ends the wait in a collective, and World::abort() ends it while
/// a group is being opened.
class NcclCommunicator final : public Communicator {
  public:
    /// Takes ownership of `group`.
    NcclCommunicator(std::shared_ptr<const Library> library, ncclComm_t group, int rank, int size,
                     const Device& device, Activity& activity)
        : Communicator(rank, size),
          library_(std::move(library)),
          group_(group),
          device_(device),
          activity_(activity) {
        void* memory = cuda::allocate(device, sizeof(int32_t));
        if (!memory) throw Error("the GPU has no memory left for a group of ranks");
        nothing_ = {memory, [device](void* p) { cuda::release(device, p); }};
        CUDA_CHECK(cudaMemset(memory, 0, sizeof(int32_t)));
    }

    ~NcclCommunicator() override {
        ncclComm_t group = group_.exchange(nullptr);
        if (!group) return;
        // Ranks wait for each other's last work here. A rank that fails must not wait.
        if (std::uncaught_exceptions() > 0) {
            library_->abort(group);
        } else {
            library_->destroy(group);
        }
    }

    void all_reduce(Stream& stream, void* data, int64_t count, DType dtype,
                    Reduction reduction) override {
        run("all-reduce", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->all_reduce(data, data, static_cast<size_t>(count), nccl_type(dtype),
                                        reduction == Reduction::max ? ncclMax : ncclSum, group,
                                        queue);
        });
        bytes_sent_ += 2 * (size() - 1) * bytes(count, dtype) / size();
    }

    void reduce_scatter(Stream& stream, void* out, void* in, int64_t count, DType dtype) override {
        run("reduce-scatter", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->reduce_scatter(in, out, static_cast<size_t>(count), nccl_type(dtype),
                                            ncclSum, group, queue);
        });
        bytes_sent_ += (size() - 1) * bytes(count, dtype);
    }

    void all_gather(Stream& stream, void* out, const void* in, int64_t count,
                    DType dtype) override {
        run("all-gather", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->all_gather(in, out, static_cast<size_t>(count), nccl_type(dtype),
                                        group, queue);
        });
        bytes_sent_ += (size() - 1) * bytes(count, dtype);
    }

    void broadcast(Stream& stream, void* data, int64_t count, DType dtype, int root) override {
        run("broadcast", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->broadcast(data, data, static_cast<size_t>(count), nccl_type(dtype),
                                       root, group, queue);
        });
        const bool is_last =
            rank() == (root + size() - 1) % size();  // of the chain that starts at the root
        if (!is_last) bytes_sent_ += bytes(count, dtype);
    }

    void send(Stream& stream, const void* data, int64_t count, DType dtype, int to) override {
        run("send", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->send(data, static_cast<size_t>(count), nccl_type(dtype), to, group,
                                  queue);
        });
        bytes_sent_ += bytes(count, dtype);
    }

    void receive(Stream& stream, void* data, int64_t count, DType dtype, int from) override {
        run("receive", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->receive(data, static_cast<size_t>(count), nccl_type(dtype), from,
                                     group, queue);
        });
    }

    void barrier(Stream& stream) override {
        run("barrier", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->all_reduce(nothing_.get(), nothing_.get(), 1, ncclInt32, ncclSum,
                                        group, queue);
        });
        bytes_sent_ += 2 * (size() - 1) * bytes(1, DType::int32) / size();
    }

    std::unique_ptr<Communicator> split(int color, int key) override {
        assert(color >= 0);
        ncclComm_t part = nullptr;
        run("split",
            [&](ncclComm_t group) { return library_->split(group, color, key, &part, nullptr); });
        int rank = 0, size = 1;
        library_->check(library_->count(part, &size), part, "split");
        library_->check(library_->user_rank(part, &rank), part, "split");
        if (size > 1)
            return std::make_unique<NcclCommunicator>(library_, part, rank, size, device_,
                                                      activity_);
        library_->destroy(part);
        return open_group_of_one(activity_);
    }

    void check() override {
        ncclComm_t group = open_group();
        ncclResult_t state = ncclSuccess;
        library_->check(library_->get_async_error(group, &state), group,
                        activity_.collective.load());
        library_->check(state, group, activity_.collective.load());
    }

    void abort() override {
        if (ncclComm_t group = group_.exchange(nullptr)) library_->abort(group);
    }

  private:
    static int64_t bytes(int64_t count, DType dtype) {
        return count * static_cast<int64_t>(size_of(dtype));
    }

    ncclComm_t open_group() const {
        ncclComm_t group = group_.load();
        if (!group)
            throw Error("rank ", rank(), " of ", size(), " abandoned the collective ",
                        activity_.collective.load(), ", since another rank is gone");
        return group;
    }

    template <class Call>
    void run(const char* name, Call&& call) {
        activity_.enter(name);
        ncclComm_t group = open_group();
        CUDA_CHECK(cudaSetDevice(device_.index));
        const ncclResult_t result = call(group);
        if (result != ncclSuccess) library_->check(result, open_group(), name);
    }

    template <class Call>
    void run(const char* name, Stream& stream, Call&& call) {
        run(name, [&](ncclComm_t group) { return call(group, cuda::stream_of(stream)); });
    }

    std::shared_ptr<const Library> library_;
    std::atomic<ncclComm_t> group_;  // null: aborted
    Device device_;
    Activity& activity_;
    std::shared_ptr<void> nothing_;  // an int32 that barriers sum up
};

}  // namespace

std::unique_ptr<Communicator> open_nccl_communicator(const World& world, const Device& device,
                                                     Activity& activity) {
    std::shared_ptr<const Library> library;
    std::string obstacle;
    try {
        library = std::make_shared<const Library>();
    } catch (const Error& error) {
        obstacle = world.host() + ": " + error.what();
    }
    // All ranks decide the same: one that stopped here alone would leave the others waiting.
    for (const std::string& other : world.all_gather(obstacle)) {
        if (!other.empty()) throw Error(other);
    }

    ncclUniqueId id{};
    if (world.rank() == 0) library->check(library->get_unique_id(&id), nullptr, "the start");
    const std::string sent = world.broadcast(std::string(id.internal, sizeof id.internal));
    std::memcpy(id.internal, sent.data(), sizeof id.internal);

    activity.enter("joining NCCL's group");
    CUDA_CHECK(cudaSetDevice(device.index));
    ncclComm_t group = nullptr;
    library->check(library->init_rank(&group, world.size(), id, world.rank()), nullptr,
                   "joining a group");
    return std::make_unique<NcclCommunicator>(std::move(library), group, world.rank(), world.size(),
                                              device, activity);
}

}  // namespace train_gpt

#else

namespace train_gpt {

std::unique_ptr<Communicator> open_nccl_communicator(const World&, const Device&, Activity&) {
    throw Error(
        "training on several GPUs needs NCCL, whose header was not there when this program was "
        "built; install it "
        "(libnccl-dev), rebuild, or start one rank");
}

}  // namespace train_gpt

#endif
