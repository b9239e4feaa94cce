#include "training/rank_process.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/terminal_text.h"
#include "base/version.h"
#include "parallel/cores.h"
#include "parallel/launch/membership.h"
#include "parallel/together.h"
#include "parallel/watchdog/watchdog.h"
#include "training/interrupt.h"

namespace train_gpt {

namespace {

using namespace std::chrono_literals;

/// What a signal to this rank does before the watchdog watches: it ends all ranks that have met, or
/// the meeting.
class SignalsOfRank {
  public:
    int stop_code() const { return stop_code_; }
    void join(const World* world) { change(world, false); }
    void leave() {
        end_by_itself();
        change(nullptr, true);
    }

  private:
    // For a meeting that cannot be ended otherwise, such as MPI's, and for MPI to end the ranks.
    static constexpr auto limit = 8s;

    void change(const World* world, bool is_over) {
        const std::lock_guard lock(mutex_);
        world_ = world;
        is_over_ = is_over;
        changed_.notify_all();
    }
    void end(int code, const std::string& line) {
        std::unique_lock lock(mutex_);
        // The signal may be mpirun's, because another rank has ended with an error. This rank is
        // about to hear of the error.
        if (changed_.wait_for(lock, 300ms, [this] { return is_over_; })) return;
        std::fprintf(stderr, "\ntrain_gpt: %s\n", line.c_str());
        stop_code_ = code;
        changed_.wait_for(lock, limit, [this] { return world_ || is_over_; });
        if (is_over_) return;  // the process ends by itself
        if (!world_) std::_Exit(code);
        std::thread([code] {
            std::this_thread::sleep_for(limit);
            std::_Exit(code);
        }).detach();
        world_->abort(code);
    }

    std::atomic<int> stop_code_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    const World* world_ = nullptr;
    bool is_over_ = false;
    const SignalEnd end_{[this](int code, const std::string& line) { end(code, line); }};
};

/// Calls leave() however the scope is left, before the world is.
class Leaving {
  public:
    explicit Leaving(SignalsOfRank& signals) : signals_(signals) {}
    ~Leaving() { signals_.leave(); }
    Leaving(const Leaving&) = delete;
    Leaving& operator=(const Leaving&) = delete;

  private:
    SignalsOfRank& signals_;
};

}  // namespace

int run_as_rank(const std::function<int(const World&)>& work) {
    SignalsOfRank signals;
    const Leaving leaving(signals);  // also where the ranks do not meet
    const World world = World::join(version(), [&] { return signals.stop_code(); });
    const Leaving before_world(signals);
    signals.join(&world);
    try {
        share_cores(world);
        return work(world);
    } catch (const SharedError& error) {
        if (world.rank() == 0) print_line(stderr, concat("train_gpt: ", error.what()));
        return 1;
    } catch (const ReportedError&) {
        throw;
    } catch (const std::exception& error) {
        if (world.size() == 1) throw;
        const std::vector<std::string>& places = world.places();
        const std::string place = places.empty() ? "" : places[static_cast<size_t>(world.rank())];
        std::fprintf(stderr, "train_gpt: rank %d (%s%shost %s): %s\n", world.rank(), place.c_str(),
                     place.empty() ? "" : ", ", world.host().c_str(), message_of(error).c_str());
        world.abort(1);
    }
}

int run_watched(const World& world, const RankOptions& options,
                const std::function<int(const Device&, const Mesh&)>& work) {
    const Device device = device_of_rank(world, options.device);
    const Mesh mesh(world, device, options.mesh, options.collectives);
    Watchdog::Listener listener(world.rank(), world.size());
    const std::string invitation = world.broadcast(listener.invitation());
    Watchdog watchdog(std::move(listener), invitation, world.activity(),
                      {.rank = world.rank(),
                       .size = world.size(),
                       .host = world.host(),
                       .places = world.places(),
                       .timeout_seconds = options.timeout_seconds,
                       .check = [&] { mesh.check(); },
                       .on_failure = [&](const char*) { return mesh.abort(); },
                       .end_process = [&](int code) { world.membership()->end_process(code); }});
    std::optional<SignalEnd> signals;
    if (world.size() > 1)
        signals.emplace([&](int code, const std::string& line) {
            if (watchdog.report(line, code)) std::this_thread::sleep_for(10s);  // it ends us
            std::_Exit(code);
        });
    try {
        return work(device, mesh);
    } catch (const SharedError& error) {
        // Printed here and not rethrown: when no exception passes the watchdog, it says goodbye to
        // the other ranks instead of reporting a failure.
        if (world.rank() == 0) print_line(stderr, concat("train_gpt: ", error.what()));
        return 1;
    } catch (const std::exception& error) {
        if (watchdog.report(message_of(error))) throw ReportedError(error.what());
        throw;
    }
}

}  // namespace train_gpt
