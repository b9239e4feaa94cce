// A library's handle that several threads share, although the library allows only one thread at a
// time to use it. Any thread may end the handle.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace train_gpt {

/// use(), try_use() and end() pass the handle to `call`, for one thread at a time. After the first
/// end(), no `call` gets the handle any more: the handle is ended at most once, and never used
/// afterwards. Any thread may call these functions, but not from within a `call`.
template <class Handle>
class ExclusiveHandle {
  public:
    /// What these functions return: `called`, except where their comments say otherwise.
    enum class Outcome { called, in_use, ended };

    explicit ExclusiveHandle(Handle handle) : handle_(std::move(handle)) {}
    /// Waits for the thread that uses the handle.
    ~ExclusiveHandle() {
        std::unique_lock lock(mutex_);
        free_.wait(lock, [&] { return !in_use_; });
    }
    ExclusiveHandle(const ExclusiveHandle&) = delete;
    ExclusiveHandle& operator=(const ExclusiveHandle&) = delete;

    /// Waits while another thread uses the handle. Returns `ended` if the handle is ended by then.
    template <class Call>
    Outcome use(Call&& call) {
        std::unique_lock lock(mutex_);
        free_.wait(lock, [&] { return !in_use_ || ended_; });
        return ended_ ? Outcome::ended : pass(lock, call);
    }

    /// Does not wait. Returns `in_use` if another thread uses the handle, and `ended` if the handle
    /// is ended.
    template <class Call>
    Outcome try_use(Call&& call) {
        std::unique_lock lock(mutex_);
        if (ended_) return Outcome::ended;
        return in_use_ ? Outcome::in_use : pass(lock, call);
    }

    /// From now on other calls return `ended`. Waits for a thread that uses the handle, but no
    /// longer than `patience`. Returns `in_use` if the thread still uses the handle then: nobody
    /// gets the handle any more. Returns `ended` if another call has ended the handle.
    template <class Call>
    Outcome end(std::chrono::milliseconds patience, Call&& call) {
        std::unique_lock lock(mutex_);
        if (std::exchange(ended_, true)) return Outcome::ended;
        free_.notify_all();
        if (!free_.wait_for(lock, patience, [&] { return !in_use_; })) return Outcome::in_use;
        return pass(lock, call);
    }

  private:
    template <class Call>
    Outcome pass(std::unique_lock<std::mutex>& lock, Call&& call) {
        struct Turn {
            ExclusiveHandle& of;
            std::unique_lock<std::mutex>& lock;
            ~Turn() {
                lock.lock();
                of.in_use_ = false;
                of.free_.notify_all();
            }
        };
        in_use_ = true;
        lock.unlock();
        const Turn turn{*this, lock};
        call(handle_);
        return Outcome::called;
    }

    const Handle handle_;
    std::mutex mutex_;  // held for a few instructions only
    std::condition_variable free_;
    bool in_use_ = false, ended_ = false;
};

}  // namespace train_gpt
