#include "parallel/watchdog/watch.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt::watchdog {

namespace {

Duration seconds(double count) {
    return std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(std::min(count, 1e8)));
}

/// Makes the kernel end the process by SIGALRM in case the watchdog does not get to it.
void set_alarm() {
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGALRM, &standard, nullptr);
    sigset_t alarms;
    ::sigemptyset(&alarms);
    ::sigaddset(&alarms, SIGALRM);
    ::pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
    ::alarm(alarm_seconds);
}

}  // namespace

Watch::Watch(const Activity& activity, WatchdogOptions options)
    : activity_(activity),
      options_(std::move(options)),
      timeout_(seconds(options_.timeout_seconds)),
      interval_(std::min<Duration>(1s, timeout_ / 10)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw Error("the watchdog cannot be woken: ", std::strerror(errno));
    now_ = real_ = next_tick_ = Clock::now();
}

// --- the main thread's side ----------------------------------------------------------------------

void Watch::start() {
    // Signals go to the main thread.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool Watch::report(const std::string& message, int exit_code) {
    std::unique_lock lock(mutex_);
    if (!std::exchange(reported_, true)) {
        report_ = Line(message);
        report_code_ = exit_code;
    }
    wake();
    return changed_.wait_for(lock, answer_limit + 2s, [&] { return announced_; });
}

void Watch::leave() {
    {
        const std::lock_guard lock(mutex_);
        leaving_ = true;
    }
    wake();
    thread_.join();
}

void Watch::wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
}

// --- the thread's loop ---------------------------------------------------------------------------

void Watch::run() {
    std::vector<pollfd> polls;
    while (!done_) {
        polls.clear();
        polls.push_back({wake_.fd(), POLLIN, 0});
        enlist(polls);
        const Time due = std::min({next_tick_, verdict_by_, leave_by_});
        const bool waited = ::poll(polls.data(), polls.size(), net::milliseconds(due - now_)) >= 0;
        advance_clock();
        drain_wake();
        if (waited) receive(polls);
        if (done_) return;
        if (now_ >= next_tick_) {
            next_tick_ = now_ + interval_;
            check();
            tick();
            if (now_ - resumed_ >= interval_) pause_ = {};
        }
        take_requests();
    }
}

void Watch::advance_clock() {
    const Time real = Clock::now();
    const Duration turn = real - std::exchange(real_, real);
    now_ += turn > 2 * interval_ ? interval_ : turn;
    if (turn > timeout_) {
        pause_ = turn;
        resumed_ = now_;
    }
}

void Watch::drain_wake() {
    uint64_t count;
    [[maybe_unused]] const auto read = ::read(wake_.fd(), &count, sizeof count);
}

void Watch::check() {
    if (!options_.check || cause_ != Cause::none) return;
    try {
        options_.check();
    } catch (const std::exception& error) {
        reported(Line(error.what()), 0);
    } catch (...) {
        reported(Line("a check failed"), 0);
    }
}

void Watch::take_requests() {
    bool reports, leaves;
    {
        const std::lock_guard lock(mutex_);
        reports = reported_ && !std::exchange(heard_, reported_);
        leaves = leaving_;
    }
    if (reports) reported(report_, report_code_);
    if (now_ >= verdict_by_) {
        verdict_by_ = Time::max();
        fail(failure_, true, exit_code_);
    } else if (cause_ == Cause::none && leaves) {
        done_ = left();
    }
}

// --- how a process ends --------------------------------------------------------------------------

void Watch::suspect(Cause cause, Duration patience, const Line& text, int exit_code) {
    if (cause <= cause_) return;
    cause_ = cause;
    failure_ = text;
    exit_code_ = exit_code;
    verdict_by_ = now_ + patience;
}

void Watch::fail(const Line& text, bool found_out, int exit_code) {
    set_alarm();
    if (found_out) print(text);
    tell(text, exit_code);
    {
        const std::lock_guard lock(mutex_);
        announced_ = true;
    }
    changed_.notify_all();
    bool can_unwind = true;
    try {
        if (options_.on_failure) can_unwind = options_.on_failure(text.c_str());
    } catch (...) {  // the process ends in any case
        can_unwind = false;
    }
    const Time grace_ends = Clock::now() + exit_grace;
    await_others();
    if (!can_unwind || !main_thread_ends(grace_ends, exit_code)) end_process(exit_code);
    done_ = true;
}

/// Gives the main thread time to end the process itself: it may be unwinding from an exception that
/// it reports. A main thread that only knows that others have gone would end as one that has
/// failed.
bool Watch::main_thread_ends(Time until, int exit_code) {
    const auto ends = [&] {
        const std::lock_guard lock(mutex_);
        return reported_ && leaving_;
    };
    while (!ends() && Clock::now() < until) {
        pollfd woken{wake_.fd(), POLLIN, 0};
        ::poll(&woken, 1, net::milliseconds(until - Clock::now()));
        drain_wake();
    }
    return exit_code == 0 && ends();
}

void Watch::end_process(int exit_code) {
    const int code = exit_code != 0 ? exit_code : options_.exit_code;
    if (options_.end_process) options_.end_process(code);
    ::_exit(code);
}

Line Watch::who(int rank, const Name& host) const {
    const char* const place =
        options_.places.empty() ? "" : options_.places[static_cast<size_t>(rank)].c_str();
    return line("rank %d (%s%shost %s)", rank, place, *place ? ", " : "", host.c_str());
}

Line Watch::silence(const char* others) const {
    return line(
        "is hung: its process is stopped, its host frozen or the link cut; nothing was heard from "
        "it for %g s%s",
        options_.timeout_seconds, others);
}

}  // namespace train_gpt::watchdog
