// The thread of a rank's watchdog, as far as it is the same on rank 0 (hub.h) and on the others
// (spoke.h): its loop, its clock, and how it ends the process.
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

// How long things may take. The sum of what happens after a failure stays below alarm_seconds.

// Of a new connection, until it has shown the secret.
constexpr Duration introduction_limit = 2s;
// A rank that died shows by then, when its neighbours' collectives failed.
constexpr Duration settling_time = 300ms;
// Rank 0's, to a rank that reports.
constexpr Duration answer_limit = 3s;
// Until the other side has read all and closed its end.
constexpr Duration goodbye_limit = 2s;
// In which a main thread that knows of the failure may end the process itself.
constexpr Duration exit_grace = 500ms;
// To SIGALRM.
constexpr unsigned alarm_seconds = 5;

class Watch {
  public:
    /// Throws Error.
    Watch(const Activity& activity, WatchdogOptions options);
    virtual ~Watch() = default;

    // From the main thread. report() may come before leave(), which ends the thread.
    void start();
    bool report(const std::string& message);
    void leave();

  protected:
    // One turn: enlist() the sockets, wait, receive(), and every interval tick().
    virtual void enlist(std::vector<pollfd>& polls) = 0;
    virtual void receive(const std::vector<pollfd>& polls) = 0;
    virtual void tick() = 0;
    /// This rank fails, and says so.
    virtual void reported(const Line& message) = 0;
    /// Each turn after the main thread has come to its good end, until it returns true.
    virtual bool left() = 0;
    /// Says what has failed to those who can still hear it, and waits until they have.
    virtual void tell(const Line&) {}
    virtual void await_others() {}

    /// Why the process will end, the stronger cause last.
    enum class Cause { none, stuck, silent, reported, dead };

    /// The process will end with this line when `patience` is over, unless a stronger cause shows
    /// until then.
    void suspect(Cause cause, Duration patience, const Line& text);
    /// Ends the process, or the thread where the main thread ends the process itself. `found_out`:
    /// it is this rank that has to print the line.
    void fail(const Line& text, bool found_out);

    /// What is said of a rank that is not heard.
    Line silence(const char* others = "") const;

    /// now_ counts the time in which this process ran.
    void advance_clock();
    /// How long ago, of the time in which this thread ran.
    Duration since(Time then) const { return now_ - then; }

    const Activity& activity_;
    const WatchdogOptions options_;
    const Duration timeout_, interval_;
    Time now_;
    // How long this process did not run, if the others must have noticed; for one interval after
    // it.
    Duration pause_{};
    Time leave_by_ = Time::max();

  private:
    void run();
    void check();
    void take_requests();
    void exit_unless_main_thread_does();
    void wake();
    void drain_wake();

    Socket wake_;  // readable when the main thread wants something
    Time real_, resumed_, next_tick_, verdict_by_ = Time::max();
    Cause cause_ = Cause::none;
    Line failure_;
    bool done_ = false, heard_ = false;
    std::thread thread_;

    std::mutex mutex_;  // held for a few instructions only
    std::condition_variable changed_;
    bool leaving_ = false, reported_ = false, announced_ = false;
    Line report_;  // the main thread's, until reported_
};

}  // namespace train_gpt::watchdog
