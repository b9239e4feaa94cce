// What the watchdog's thread does on every rank: the loop, the clock, and how the process ends.
// Rank 0's thread (hub.h) and the threads of the other ranks (spoke.h) add the rest.
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

// Time limits. The limits after a failure add up to less than alarm_seconds.

// A new connection must show the secret within this time.
constexpr Duration introduction_limit = 2s;
// The time between a reported failure and the verdict. If another rank's death has caused the
// failure, the watchdog notices the death within this time.
constexpr Duration settling_time = 300ms;
// A rank that reports waits so long for rank 0's answer.
constexpr Duration answer_limit = 3s;
// The other side must read everything and close its end within this time.
constexpr Duration goodbye_limit = 2s;
// A main thread that knows of the failure may take so long to end the process itself.
constexpr Duration exit_grace = 500ms;
// SIGALRM ends the process after this time.
constexpr unsigned alarm_seconds = 5;

class Watch {
  public:
    /// Throws Error if the kernel gives no event descriptor.
    Watch(const Activity& activity, WatchdogOptions options);
    virtual ~Watch() = default;

    // The main thread calls these. leave() ends the watchdog's thread; report() may come before it.
    void start();
    bool report(const std::string& message, int exit_code);
    void leave();

  protected:
    // One turn of the loop: enlist() the sockets, wait, receive(); and tick() once per interval.
    virtual void enlist(std::vector<pollfd>& polls) = 0;
    virtual void receive(const std::vector<pollfd>& polls) = 0;
    virtual void tick() = 0;
    /// This rank reports its own failure. If the exit code is not 0, the rank has not failed but is
    /// to end.
    virtual void reported(const Line& message, int exit_code) = 0;
    /// Called in each turn after the main thread has called leave(), until it returns true. Not
    /// called if something has failed.
    virtual bool left() = 0;
    /// Sends the line about the failure, and the exit code, to the ranks that can still be reached.
    virtual void tell(const Line&, int /*exit_code*/) {}
    /// Waits until these ranks have read the line.
    virtual void await_others() {}

    /// Why the process will end; stronger causes come later.
    enum class Cause { none, stuck, silent, reported, dead };

    /// The process will end with this line after `patience`, unless a stronger cause is found by
    /// then. Has no effect if an equal or stronger cause was found before.
    void suspect(Cause cause, Duration patience, const Line& text, int exit_code = 0);
    /// Ends the process, or only this thread if the main thread ends the process itself. If
    /// `found_out`, this rank prints the line. exit_code 0 stands for WatchdogOptions::exit_code.
    void fail(const Line& text, bool found_out, int exit_code);

    /// "rank 37 (data 9, tensor 1, host nodeA)"; without the place if the rank has none.
    Line who(int rank, const Name& host) const;
    /// The verdict on a rank from which no message comes.
    Line silence(const char* others = "") const;

    /// Advances now_, which counts only the time in which this process ran.
    void advance_clock();
    /// How long ago `then` was, counting only the time in which this process ran.
    Duration since(Time then) const { return now_ - then; }

    const Activity& activity_;
    const WatchdogOptions options_;
    const Duration timeout_, interval_;
    Time now_;
    // How long this process did not run, if the others may have noticed it; else 0. Reset one
    // interval later.
    Duration pause_{};
    Time leave_by_ = Time::max();

  private:
    void run();
    void check();
    void take_requests();
    bool main_thread_ends(Time until, int exit_code);
    [[noreturn]] void end_process(int exit_code);
    void wake();
    void drain_wake();

    Socket wake_;  // readable when the main thread has a request
    Time real_, resumed_, next_tick_, verdict_by_ = Time::max();
    Cause cause_ = Cause::none;
    Line failure_;
    int exit_code_ = 0;  // that belongs to failure_
    bool done_ = false, heard_ = false;
    std::thread thread_;

    std::mutex mutex_;  // held for a few instructions only
    std::condition_variable changed_;
    bool leaving_ = false, reported_ = false, announced_ = false;
    int report_code_ = 0;
    // report_code_ and report_ are written by the main thread before it sets reported_, and are not
    // changed later.
    Line report_;
};

}  // namespace train_gpt::watchdog
