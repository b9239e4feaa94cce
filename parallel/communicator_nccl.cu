// Collectives between GPUs. TRAIN_GPT_NCCL is defined where the build found NCCL's header. The
// library is loaded when a group is opened, so a machine with one GPU does not need it.
#include "base/error.h"
#include "device/copy.h"
#include "device/cuda.h"
#include "device/cuda_queue.h"
#include "parallel/communicator_kinds.h"

#ifdef TRAIN_GPT_NCCL
#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <nccl.h>

#include "parallel/exclusive_handle.h"
#include "parallel/nccl_library.h"

namespace train_gpt {

namespace {

using nccl::Library;

/// Before the library is loaded: it reads the variable once.
void order_by_submission() { ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0); }

ncclConfig_t config_of(int max_ctas) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (max_ctas > 0) config.maxCTAs = max_ctas;
    return config;
}

ncclDataType_t nccl_type(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return ncclFloat32;
        case DType::bf16:
            return ncclBfloat16;
        case DType::int32:
            return ncclInt32;
        case DType::int64:
            return ncclInt64;
        default:
            return ncclFloat64;
    }
}

/// NCCL allows one thread at a time to use a communicator, and ncclCommAbort only while no other
/// thread is in a call ("Thread Safety" and "Fault Tolerance" in its user guide).
struct Group {
    std::shared_ptr<const Library> library;
    ExclusiveHandle<ncclComm_t> comm;

    /// Frees the communicator, unless that has been done. A call of another thread returns within
    /// microseconds, or waits for a rank that is gone: then the communicator is left to the end of
    /// the process.
    void end(decltype(Library::abort) how) {
        constexpr std::chrono::milliseconds patience{500};
        comm.end(patience, how);
    }
};

/// Buffers that a group has registered, until the object is destroyed.
class Registration {
  public:
    Registration(std::shared_ptr<Group> group, const Device& device)
        : group_(std::move(group)), device_(device) {}
    ~Registration() {
        // Collectives of a rank that fails may never end, and its group will be aborted.
        if (handles_.empty() || std::uncaught_exceptions() > 0) return;
        cudaSetDevice(device_.index);
        cudaDeviceSynchronize();
        group_->comm.use([&](ncclComm_t comm) {
            for (void* handle : handles_) group_->library->deregister_buffer(comm, handle);
        });
    }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    ncclResult_t add(ncclComm_t comm, std::span<std::byte> buffer) {
        void* handle = nullptr;
        const ncclResult_t result =
            group_->library->register_buffer(comm, buffer.data(), buffer.size(), &handle);
        if (result == ncclSuccess) handles_.push_back(handle);
        return result;
    }

  private:
    std::shared_ptr<Group> group_;
    Device device_;
    std::vector<void*> handles_;
};

/// A blocking communicator: a call returns when its work is in the stream, so that an event can be
/// recorded after it. With NCCL's non-blocking kind each call would have to be polled until then.
/// When a rank never comes, abort() ends the wait in a collective, and World::abort() ends it while
/// a group is being opened.
class NcclCommunicator final : public Communicator {
  public:
    /// Takes ownership of `comm`.
    NcclCommunicator(std::shared_ptr<const Library> library, ncclComm_t comm, int rank, int size,
                     const Device& device, Activity& activity)
        : Communicator(rank, size),
          library_(library),
          group_(new Group{std::move(library), ExclusiveHandle(comm)}),
          device_(device),
          activity_(activity),
          nothing_(allocate(sizeof(int32_t))) {
        const int32_t zero = 0;
        copy_now(device_, nothing_.get(), &zero, sizeof zero);
    }

    ~NcclCommunicator() override {
        // Ranks wait for each other's last work here. A rank that fails must not wait.
        group_->end(std::uncaught_exceptions() > 0 ? library_->abort : library_->destroy);
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

    void all_to_all(Stream& stream, std::span<const Transfer> sends,
                    std::span<const Transfer> receives, DType dtype) override {
        const ncclDataType_t type = nccl_type(dtype);
        // Outside of NCCL's group, each message would wait for the one before it.
        run("all-to-all", stream, [&](ncclComm_t group, cudaStream_t queue) {
            ncclResult_t result = library_->group_start();
            const auto then = [&](ncclResult_t next) {
                if (result == ncclSuccess) result = next;
            };
            for (const Transfer& t : receives)
                then(library_->receive(t.data, static_cast<size_t>(t.count), type, t.rank, group,
                                       queue));
            for (const Transfer& t : sends)
                then(library_->send(t.data, static_cast<size_t>(t.count), type, t.rank, group,
                                    queue));
            then(library_->group_end());
            return result;
        });
        for (const Transfer& t : sends) bytes_sent_ += bytes(t.count, dtype);
    }

    void barrier(Stream& stream) override {
        run("barrier", stream, [&](ncclComm_t group, cudaStream_t queue) {
            return library_->all_reduce(nothing_.get(), nothing_.get(), 1, ncclInt32, ncclSum,
                                        group, queue);
        });
        bytes_sent_ += 2 * (size() - 1) * bytes(1, DType::int32) / size();
    }

    std::shared_ptr<void> register_buffers(
        Stream& stream, const std::vector<std::span<std::byte>>& buffers) override {
        auto registration = std::make_shared<Registration>(group_, device_);
        bool failed = !library_->register_buffer;
        std::string reason;
        if (!failed)
            run("register", [&](ncclComm_t comm) {
                for (const std::span<std::byte> buffer : buffers) {
                    const ncclResult_t result = registration->add(comm, buffer);
                    if (result == ncclSuccess) continue;
                    failed = true;
                    reason = library_->get_error_string(result);
                    break;
                }
                return ncclSuccess;
            });
        // NCCL does not define what happens if some ranks pass registered memory and others do not.
        const double last = largest(stream, failed ? rank() + 1 : 0);
        if (last == 0) return registration;
        if (last == rank() + 1 && !reason.empty())
            std::fprintf(stderr,
                         "note: NCCL does not register the memory that ranks exchange (rank %d: "
                         "%s); its collectives copy through memory of their own\n",
                         rank(), reason.c_str());
        return nullptr;
    }

    std::unique_ptr<Communicator> split(int color, int key, int max_ctas) override {
        assert(color >= 0);
        ncclComm_t part = nullptr;
        // Without a configuration, the part would have this group's.
        ncclConfig_t config = config_of(max_ctas);
        run("split",
            [&](ncclComm_t group) { return library_->split(group, color, key, &part, &config); });
        int rank = 0, size = 1;
        library_->check(library_->count(part, &size), part, "split");
        library_->check(library_->user_rank(part, &rank), part, "split");
        if (size > 1)
            return std::make_unique<NcclCommunicator>(library_, part, rank, size, device_,
                                                      activity_);
        library_->destroy(part);
        return open_group_of_one(activity_);
    }

    std::shared_ptr<Stream> exchange_stream(const Device& device) override {
        return library_->needs_one_stream() ? library_->only_stream(device)
                                            : Communicator::exchange_stream(device);
    }

    void check() override {
        const char* collective = activity_.collective.load();
        // A call that another thread is in reports what fails.
        const auto outcome = group_->comm.try_use([&](ncclComm_t comm) {
            ncclResult_t state = ncclSuccess;
            library_->check(library_->get_async_error(comm, &state), comm, collective);
            library_->check(state, comm, collective);
        });
        if (outcome == Outcome::ended) fail_ended();
    }

    void abort() override { group_->end(library_->abort); }

  private:
    static int64_t bytes(int64_t count, DType dtype) {
        return count * static_cast<int64_t>(size_of(dtype));
    }

    using Outcome = ExclusiveHandle<ncclComm_t>::Outcome;

    [[noreturn]] void fail_ended() const {
        throw Error("rank ", rank(), " of ", size(), " abandoned the collective ",
                    activity_.collective.load(), ", since another rank is gone");
    }

    template <class Call>
    void run(const char* name, Call&& call) {
        activity_.enter(name);
        CUDA_CHECK(cudaSetDevice(device_.index));
        const auto outcome =
            group_->comm.use([&](ncclComm_t comm) { library_->check(call(comm), comm, name); });
        if (outcome == Outcome::ended) fail_ended();
    }

    template <class Call>
    void run(const char* name, Stream& stream, Call&& call) {
        run(name, [&](ncclComm_t group) { return call(group, cuda::stream_of(stream)); });
    }

    /// The largest of the ranks' numbers. Waits for it.
    double largest(Stream& stream, double number) {
        const auto memory = allocate(static_cast<size_t>(size()) * sizeof(double));
        auto* const numbers = static_cast<double*>(memory.get());
        std::vector<double> all(static_cast<size_t>(size()));
        const auto copy = [&](double* to, const double* from, size_t n) {
            CUDA_CHECK(cudaMemcpyAsync(to, from, n * sizeof(double), cudaMemcpyDefault,
                                       cuda::stream_of(stream)));
        };
        copy(numbers + rank(), &number, 1);
        all_gather(stream, numbers, numbers + rank(), 1, DType::fp64);
        copy(all.data(), numbers, all.size());
        stream.synchronize();
        return *std::max_element(all.begin(), all.end());
    }

    std::shared_ptr<void> allocate(size_t bytes) const {
        void* memory = cuda::allocate(device_, bytes);
        if (!memory) throw Error("the GPU has no memory left for a group of ranks");
        return {memory, [device = device_](void* p) { cuda::release(device, p); }};
    }

    std::shared_ptr<const Library> library_;
    std::shared_ptr<Group> group_;
    Device device_;
    Activity& activity_;
    std::shared_ptr<void> nothing_;  // an int32 that barriers sum up
};

}  // namespace

std::unique_ptr<Communicator> open_nccl_communicator(const World& world, const Device& device,
                                                     Activity& activity,
                                                     const CollectiveSettings& settings) {
    if (settings.encrypt)
        throw Error(
            "parallel.encrypt is true, but NCCL's messages between GPUs stay in clear; set it to "
            "false, and keep others off the network between the hosts");
    std::shared_ptr<const Library> library;
    std::string obstacle;
    if (settings.several_groups) order_by_submission();
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
    ncclConfig_t config = config_of(settings.max_ctas);
    ncclComm_t group = nullptr;
    library->check(library->init_rank(&group, world.size(), id, world.rank(), &config), nullptr,
                   "joining a group");
    return std::make_unique<NcclCommunicator>(std::move(library), group, world.rank(), world.size(),
                                              device, activity);
}

}  // namespace train_gpt

#else

namespace train_gpt {

std::unique_ptr<Communicator> open_nccl_communicator(const World&, const Device&, Activity&,
                                                     const CollectiveSettings&) {
    throw Error(
        "training on several GPUs needs NCCL, whose header was not there when this program was "
        "built; install it "
        "(libnccl-dev), rebuild, or start one rank");
}

}  // namespace train_gpt

#endif
