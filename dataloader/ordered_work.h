// Processes the batches of a stream on several threads, with results in the stream's order.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "dataloader/documents.h"

namespace train_gpt {

template <class Result>
class OrderedWork {
  public:
    using Work = std::function<Result(const Batch&)>;

    /// Each thread makes its own `Work` and calls it for batches as they come. At most 2 · threads
    /// + 2 batches are held at a time, which bounds the memory.
    OrderedWork(DocumentStream& stream, int threads, std::function<Work()> make_work)
        : stream_(stream), make_work_(std::move(make_work)), window_(2 * size_t(threads) + 2) {
        try {
            for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
        } catch (const std::system_error&) {
            if (threads_.empty()) throw;  // fewer threads do the same work
        }
    }
    ~OrderedWork() { stop(); }
    OrderedWork(const OrderedWork&) = delete;
    OrderedWork& operator=(const OrderedWork&) = delete;

    enum class Next { result, nothing_yet, end };

    /// The next batch and its result. Waits for at most 0.1 s. Rethrows what reading the batch or
    /// the work on it threw.
    Next next(Batch& batch, Result& result) {
        std::unique_lock lock(mutex_);
        const auto ready = [&] { return slots_.empty() ? ended_ : slots_.front().ready; };
        if (!changed_.wait_for(lock, std::chrono::milliseconds(100), ready))
            return Next::nothing_yet;
        if (slots_.empty()) return Next::end;
        if (slots_.front().failure) std::rethrow_exception(slots_.front().failure);
        batch = std::move(slots_.front().batch);
        result = std::move(slots_.front().result);
        slots_.pop_front();
        lock.unlock();
        changed_.notify_all();
        return Next::result;
    }

    /// Stops the work and waits for the threads.
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        stream_.stop();
        changed_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

  private:
    struct Slot {
        Batch batch;
        Result result;
        std::exception_ptr failure;
        bool ready = false;
    };

    void run() {
        Work work;
        while (Slot* slot = take()) {
            if (!slot->failure) {
                try {
                    if (!work) work = make_work_();
                    slot->result = work(slot->batch);
                } catch (...) {
                    slot->failure = std::current_exception();
                }
            }
            {
                const std::lock_guard lock(mutex_);
                slot->ready = true;
            }
            changed_.notify_all();
        }
    }

    /// Takes the next batch into a new slot; null at the end.
    Slot* take() {
        const std::lock_guard in_turn(taking_);
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return stop_ || ended_ || slots_.size() < window_; });
            if (stop_ || ended_) return nullptr;
        }
        std::optional<Batch> batch;
        std::exception_ptr failure;
        try {
            batch = stream_.next();
        } catch (...) {
            failure = std::current_exception();
        }
        const std::lock_guard lock(mutex_);
        if (failure || !batch) {
            ended_ = true;
            changed_.notify_all();
        }
        if (!failure && !batch) return nullptr;
        Slot& slot = slots_.emplace_back();  // a deque does not move the other slots
        if (batch) slot.batch = std::move(*batch);
        slot.failure = failure;
        return &slot;
    }

    DocumentStream& stream_;
    const std::function<Work()> make_work_;
    const size_t window_;
    std::mutex taking_, mutex_;
    std::condition_variable changed_;
    std::deque<Slot> slots_;  // in the order of the batches
    bool ended_ = false, stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace train_gpt
