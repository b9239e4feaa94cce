// What the watchdog threads of rank 0 (hub.h) and of the other ranks (spoke.h) have in common: the
// loop, the clock, and how they end the process.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <poll.h>

#include "parallel/activity.h"
#include "parallel/watchdog/connection.h"
#include "parallel/watchdog/text.h"
#include "parallel/watchdog/watchdog.h"

namespace train_gpt::watchdog {

using namespace std::chrono_literals;

// Time limits. The sum of those after a failure stays below alarm_seconds.

// For a new connection to show the secret.
constexpr Duration introduction_limit = 2s;
// Between a reported failure and the verdict. If the cause is the death of another rank, that is
// noticed within this time.
constexpr Duration settling_time = 300ms;
// For rank 0's answer to a rank that reports.
constexpr Duration answer_limit = 3s;
// For the other side to read everything and close its end.
constexpr Duration goodbye_limit = 2s;
// For a main thread that knows of the failure to end the process itself.
constexpr Duration exit_grace = 500ms;
// Until SIGALRM.
constexpr unsigned alarm_seconds = 5;

class Watch {
  public:
    /// Throws Error.
    Watch(const Activity& activity, WatchdogOptions options);
    virtual ~Watch() = default;

    // Called by the main thread. report() may come before leave(), which ends the watchdog's
    // thread.
    void start();
    bool report(const std::string& message, int exit_code);
    void leave();

  protected:
    // One turn of the loop: enlist() the sockets, wait, receive(); and tick() once per interval.
    virtual void enlist(std::vector<pollfd>& polls) = 0;
    virtual void receive(const std::vector<pollfd>& polls) = 0;
    virtual void tick() = 0;
    /// This rank reports its own failure, or, where the exit code is not 0, that it is to end.
    virtual void reported(const Line& message, int exit_code) = 0;
    /// Called each turn after the main thread has called leave(), if nothing has failed, until it
    /// returns true.
    virtual bool left() = 0;
    /// Sends what has failed to the ranks that can still be reached, with their exit code.
    virtual void tell(const Line&, int /*exit_code*/) {}
    /// Waits until they have read it.
    virtual void await_others() {}

    /// Why the process will end; stronger causes come later.
    enum class Cause { none, stuck, silent, reported, dead };

    /// The process will end with this line after `patience`, unless a stronger cause is found by
    /// then. Has no effect after a cause that is at least as strong.
    void suspect(Cause cause, Duration patience, const Line& text, int exit_code = 0);
    /// Ends the process, or only this thread if the main thread ends the process itself. If
    /// `found_out`, this rank has to print the line. 0: the exit code of a failure.
    void fail(const Line& text, bool found_out, int exit_code);

    /// "rank 37 (data 9, tensor 1, host nodeA)"; the place only where the rank has one.
    Line who(int rank, const Name& host) const;
    /// The verdict on a rank that is not heard from.
    Line silence(const char* others = "") const;

    /// Advances now_, which counts only the time in which this process ran.
    void advance_clock();
    /// How long ago `then` was, counting only the time in which this process ran.
    Duration since(Time then) const { return now_ - then; }

    const Activity& activity_;
    const WatchdogOptions options_;
    const Duration timeout_, interval_;
    Time now_;
    // How long this process did not run, if it was long enough for the others to notice; reset one
    // interval later.
    Duration pause_{};
    Time leave_by_ = Time::max();

  private:
    void run();
    void check();
    void take_requests();
    void exit_unless_main_thread_does(int exit_code);
    void wake();
    void drain_wake();

    Socket wake_;  // readable when the main thread has a request
    Time real_, resumed_, next_tick_, verdict_by_ = Time::max();
    Cause cause_ = Cause::none;
    Line failure_;
    int exit_code_ = 0;  // of that failure
    bool done_ = false, heard_ = false;
    std::thread thread_;

    std::mutex mutex_;  // held for a few instructions only
    std::condition_variable changed_;
    bool leaving_ = false, reported_ = false, announced_ = false;
    int report_code_ = 0;
    Line report_;  // both written by the main thread before it sets reported_, not changed later
};

}  // namespace train_gpt::watchdog
