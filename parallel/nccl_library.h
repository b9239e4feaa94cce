// NCCL, loaded at run time. Only for builds that have its header (TRAIN_GPT_NCCL).
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include <dlfcn.h>
#include <nccl.h>

#include "base/error.h"
#include "device/nvidia_library.h"
#include "device/stream.h"

namespace train_gpt::nccl {

/// NCCL's functions. The library stays loaded until the process ends, because it has threads.
class Library {
  public:
    Library() {
        std::string reason;
        handle_ =
            cuda::open_library({.name = "libnccl.so.2", .package = "nccl", .folder = "NCCL_HOME"},
                               RTLD_NOW | RTLD_LOCAL, reason);
        if (!handle_)
            throw Error(
                "training on several GPUs needs NCCL, whose library cannot be loaded: ", reason,
                "; install it (libnccl2, or pip install nvidia-nccl-cu13 in an active "
                "Python environment) or set NCCL_HOME to its folder");
        find(get_unique_id, "ncclGetUniqueId");
        find(get_version, "ncclGetVersion");
        find(init_rank, "ncclCommInitRankConfig");
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
        find(group_start, "ncclGroupStart");
        find(group_end, "ncclGroupEnd");
        if (get_version(&version_) != ncclSuccess) version_ = 0;
        if (version_ >= registers_from) {
            find(register_buffer, "ncclCommRegister");
            find(deregister_buffer, "ncclCommDeregister");
        }
    }

    decltype(&ncclGetUniqueId) get_unique_id;
    decltype(&ncclGetVersion) get_version;
    decltype(&ncclCommInitRankConfig) init_rank;
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
    decltype(&ncclGroupStart) group_start;
    decltype(&ncclGroupEnd) group_end;
    // Null in a library that is too old. Not every header that this compiles with has them.
    ncclResult_t (*register_buffer)(ncclComm_t, void* data, size_t bytes, void** handle) = nullptr;
    ncclResult_t (*deregister_buffer)(ncclComm_t, void* handle) = nullptr;

    /// Before 2.26, all operations of a process must be ordered by streams, or groups wait for each
    /// other for ever ("Using multiple NCCL communicators concurrently" in its user guide). Later
    /// versions need order_by_submission().
    bool needs_one_stream() const { return version_ < orders_from; }
    std::shared_ptr<Stream> only_stream(const Device& device) const {
        if (!only_stream_)
            only_stream_ = std::make_shared<Stream>(device, false, Stream::Priority::high);
        return only_stream_;
    }

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
    /// Buffers are registered from version 2.24 on. 2.23 would share memory of cudaMalloc between
    /// the GPUs of a node, which 2.24 turned off because it may hang (NCCL_LEGACY_CUDA_REGISTER).
    static constexpr int registers_from = 22400;
    static constexpr int orders_from = 22600;

    template <class Function>
    void find(Function*& function, const char* name) {
        function = reinterpret_cast<Function*>(::dlsym(handle_, name));
        if (!function)
            throw Error("the NCCL library that was found is too old: it has no ", name,
                        "; version 2.18 is needed");
    }

    void* handle_;
    int version_ = 0;
    mutable std::shared_ptr<Stream> only_stream_;
};

}  // namespace train_gpt::nccl
