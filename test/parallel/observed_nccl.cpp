// A library that stands in front of NCCL's. It writes down what a rank calls, as lines of the file
// OBSERVED_NCCL_LOG followed by the rank, and passes it on to the library OBSERVED_NCCL; without
// one, collectives succeed and do nothing. Like NCCL it takes memory of the GPU when a communicator
// first uses a collective in another way, which here depends on dtype and bytes, or first sends to
// a rank or receives from it: each time OBSERVED_NCCL_TAKES bytes. The rank OBSERVED_NCCL_REFUSES
// registers one buffer at most. "misuse" is what NCCL forbids: two threads in calls with one
// communicator, and calls after its end. With OBSERVED_NCCL_ABORTS = "together", an abort returns
// when all communicators that this rank has opened are being aborted, as freeing memory waits for
// the kernels of the others; with "never", that of the communicator opened last does not return.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>

#include <dlfcn.h>
#include <nccl.h>

namespace {

struct Observed {
    int rank = 0;
    std::atomic<int> threads{0};
    std::atomic<bool> ended{false};
    std::map<const char*, size_t> registered;          // address → bytes
    std::set<std::tuple<std::string, int, int>> used;  // collective, dtype or peer, bytes
};

std::mutex mutex;
std::map<ncclComm_t, std::shared_ptr<Observed>> communicators;
const Observed* last = nullptr;  // the one opened last

const char* setting(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

void say(const Observed& of, const std::string& line) {
    const std::string path = setting("OBSERVED_NCCL_LOG") + std::to_string(of.rank);
    std::FILE* file = std::fopen(path.c_str(), "a");
    std::fputs((line + "\n").c_str(), file);
    std::fclose(file);
}

/// The function that comes after this library's of the same name; null without a library.
template <class Function>
Function* behind(const char* name, Function*) {
    static void* const library = *setting("OBSERVED_NCCL")
                                     ? ::dlopen(setting("OBSERVED_NCCL"), RTLD_NOW | RTLD_LOCAL)
                                     : nullptr;
    return library ? reinterpret_cast<Function*>(::dlsym(library, name)) : nullptr;
}

/// A call with a communicator.
class Call {
  public:
    explicit Call(ncclComm_t comm) {
        const std::lock_guard lock(mutex);
        of_ = communicators.at(comm);
        if (of_->ended) say(*of_, "misuse: a call after the end");
        if (++of_->threads > 1) say(*of_, "misuse: two threads in calls");
    }
    ~Call() { --of_->threads; }
    Observed& of() const { return *of_; }

  private:
    std::shared_ptr<Observed> of_;
};

bool take_memory() {
    using Allocate = int(void**, size_t);
    void* memory = nullptr;
    const size_t bytes = std::strtoull(setting("OBSERVED_NCCL_TAKES"), nullptr, 10);
    auto* const allocate = reinterpret_cast<Allocate*>(::dlsym(RTLD_DEFAULT, "cudaMalloc"));
    return bytes == 0 || allocate(&memory, bytes) == 0;
}

size_t size_of(ncclDataType_t type) {
    return type == ncclBfloat16 ? 2 : type == ncclFloat64 ? 8 : 4;
}

bool is_registered(const Observed& of, const void* data, size_t bytes) {
    const auto* first = static_cast<const char*>(data);
    auto after = of.registered.upper_bound(first);
    if (after == of.registered.begin()) return false;
    --after;
    return first + bytes <= after->first + after->second;
}

struct Buffer {
    const void* data;
    size_t bytes;
};

/// Notes a collective, and takes memory if it is the first of its kind.
ncclResult_t observe(Observed& of, const char* name, ncclDataType_t type, Buffer in, Buffer out) {
    const size_t bytes = in.bytes > out.bytes ? in.bytes : out.bytes;
    const bool first = of.used.insert({name, type, std::bit_width(bytes) / 2}).second;
    const bool registered =
        is_registered(of, in.data, in.bytes) && is_registered(of, out.data, out.bytes);
    say(of, std::string(name) + ' ' + std::to_string(type) + ' ' + std::to_string(bytes) +
                (registered ? " registered" : " unregistered") + (first ? " first" : ""));
    return !first || take_memory() ? ncclSuccess : ncclUnhandledCudaError;
}

/// The same for a message.
ncclResult_t observe(Observed& of, const char* name, int peer) {
    const bool first = of.used.insert({name, peer, 0}).second;
    say(of, std::string(name) + ' ' + std::to_string(peer) + (first ? " first" : ""));
    return !first || take_memory() ? ncclSuccess : ncclUnhandledCudaError;
}

ncclComm_t add(ncclComm_t comm, int rank) {
    const std::lock_guard lock(mutex);
    if (!comm) comm = reinterpret_cast<ncclComm_t>(new char);
    communicators[comm] = std::make_shared<Observed>();
    communicators[comm]->rank = rank;
    last = communicators[comm].get();
    return comm;
}

const Observed* last_opened() {
    const std::lock_guard lock(mutex);
    return last;
}

std::string blocks_of(const ncclConfig_t* config) {
    const bool capped = config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
    return "at most " + (capped ? std::to_string(config->maxCTAs) : "any") + " blocks";
}

}  // namespace

#define PASS_ON(function, ...)                       \
    auto* const next = behind(#function, &function); \
    return next ? next(__VA_ARGS__) : ncclSuccess

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = *setting("OBSERVED_NCCL_VERSION") ? std::atoi(setting("OBSERVED_NCCL_VERSION"))
                                                 : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { PASS_ON(ncclGetUniqueId, id); }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    *comm = nullptr;
    auto* const next = behind("ncclCommInitRankConfig", &ncclCommInitRankConfig);
    const ncclResult_t result = next ? next(comm, ranks, id, rank, config) : ncclSuccess;
    if (result != ncclSuccess) return result;
    *comm = add(*comm, rank);
    say(*communicators[*comm], "open, " + blocks_of(config));
    return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
    const Call call(comm);
    auto* const next = behind("ncclCommSplit", &ncclCommSplit);
    const ncclResult_t result = next ? next(comm, color, key, part, config) : ncclSuccess;
    if (result == ncclSuccess) *part = add(*part, call.of().rank);
    say(call.of(), "split, " + blocks_of(config));
    return result;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    const Call call(comm);
    PASS_ON(ncclCommCount, comm, count);
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    const Call call(comm);
    PASS_ON(ncclCommUserRank, comm, rank);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    const Call call(comm);
    say(call.of(), "destroy, " + std::to_string(call.of().registered.size()) + " registered");
    call.of().ended = true;
    PASS_ON(ncclCommDestroy, comm);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    const Call call(comm);
    say(call.of(), "abort");
    call.of().ended = true;
    const std::string how = setting("OBSERVED_NCCL_ABORTS");
    const auto others_run = [] {
        const std::lock_guard lock(mutex);
        return std::ranges::any_of(communicators, [](const auto& c) { return !c.second->ended; });
    };
    while ((how == "together" && others_run()) || (how == "never" && &call.of() == last_opened()))
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    PASS_ON(ncclCommAbort, comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    const Call call(comm);
    *error = ncclSuccess;
    PASS_ON(ncclCommGetAsyncError, comm, error);
}

const char* ncclGetErrorString(ncclResult_t result) {
    auto* const next = behind("ncclGetErrorString", &ncclGetErrorString);
    return next ? next(result) : "an error";
}

const char* ncclGetLastError(ncclComm_t comm) {
    auto* const next = behind("ncclGetLastError", &ncclGetLastError);
    return next ? next(comm) : "";
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    const Call call(comm);
    const size_t bytes = count * size_of(type);
    if (const auto r = observe(call.of(), "all-reduce", type, {in, bytes}, {out, bytes});
        r != ncclSuccess)
        return r;
    PASS_ON(ncclAllReduce, in, out, count, type, op, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    const Call call(comm);
    int ranks = 1;
    if (auto* const next = behind("ncclCommCount", &ncclCommCount)) next(comm, &ranks);
    const size_t bytes = count * size_of(type), all = bytes * static_cast<size_t>(ranks);
    if (const auto r = observe(call.of(), "reduce-scatter", type, {in, all}, {out, bytes});
        r != ncclSuccess)
        return r;
    PASS_ON(ncclReduceScatter, in, out, count, type, op, comm, stream);
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    const Call call(comm);
    int ranks = 1;
    if (auto* const next = behind("ncclCommCount", &ncclCommCount)) next(comm, &ranks);
    const size_t bytes = count * size_of(type), all = bytes * static_cast<size_t>(ranks);
    if (const auto r = observe(call.of(), "all-gather", type, {in, bytes}, {out, all});
        r != ncclSuccess)
        return r;
    PASS_ON(ncclAllGather, in, out, count, type, comm, stream);
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    const Call call(comm);
    PASS_ON(ncclBroadcast, in, out, count, type, root, comm, stream);
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    const Call call(comm);
    if (const auto r = observe(call.of(), "send to", peer); r != ncclSuccess) return r;
    PASS_ON(ncclSend, data, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const Call call(comm);
    if (const auto r = observe(call.of(), "receive from", peer); r != ncclSuccess) return r;
    PASS_ON(ncclRecv, data, count, type, peer, comm, stream);
}

ncclResult_t ncclGroupStart() { PASS_ON(ncclGroupStart, ); }
ncclResult_t ncclGroupEnd() { PASS_ON(ncclGroupEnd, ); }

ncclResult_t ncclCommRegister(ncclComm_t comm, void* data, size_t bytes, void** handle) {
    const Call call(comm);
    const std::string refusing = setting("OBSERVED_NCCL_REFUSES");
    if (refusing == std::to_string(call.of().rank) && !call.of().registered.empty())
        return ncclSystemError;
    say(call.of(), "register " + std::to_string(bytes));
    call.of().registered[static_cast<char*>(data)] = bytes;
    *handle = data;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t comm, void* handle) {
    const Call call(comm);
    say(call.of(),
        "deregister " + std::to_string(call.of().registered[static_cast<char*>(handle)]));
    call.of().registered.erase(static_cast<char*>(handle));
    return ncclSuccess;
}

}  // extern "C"
