// The failure detector of a job of many ranks. A collective in which one rank is missing waits for
// ever; so each rank has a thread that knows whether the others live and make progress, and that
// ends the process when they do not.
//
// Rank 0's thread listens on a TCP port, the others connect to it. Both sides send a heartbeat with
// their Activity every min(1 s, timeout_seconds / 10). A rank fails when
//
//     dead      its connection ends without a goodbye
//     hung      nothing is heard of it for timeout_seconds: a stopped process, a frozen host, a cut
//               link
//     stuck     it is heard, but its pulses have not changed for timeout_seconds, and it is the one
//               that has entered the fewest collectives and then is in the lowest step. Those that
//               are ahead wait for it: no failure of theirs, however long it works (a checkpoint)
//               as long as it pulses
//     reported  it says so itself: report(), or WatchdogOptions::check
//     absent    it has not come within timeout_seconds
//
// Rank 0 then prints one line that names rank, host and last collective, and tells the others. The
// others judge rank 0 in the same way, as far as dead and hung; rank 1 prints its line at once and
// the rest, which cannot know whether rank 1 lives, one to three seconds later, when most launchers
// have ended them. Then every process calls on_failure and ends by _exit(exit_code) within about a
// second (rank 0 within three: it waits until the others have heard it). Nothing that the main
// thread does, or waits for, delays that; should on_failure itself not come back, SIGALRM ends the
// process after five seconds.
//
// Time in which a process did not run (a stopped job that is continued) counts for nobody.
//
// The port lets in only those who show a random secret, drops everybody else after two seconds at
// the latest, and is closed as soon as all ranks have come. The secret and what is said are not
// encrypted: like MPI's own messages they rely on a network between the nodes on which nobody
// listens.
//
// Rank 0's side is in hub.h, the other ranks' in spoke.h, what both have in common in watch.h; they
// exchange the messages of protocol.h over the sockets of connection.h.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "parallel/activity.h"

namespace train_gpt {

namespace watchdog {
class Watch;
}

struct WatchdogOptions {
    int rank = 0, size = 1;
    std::string host = {};         // this rank's, for the lines; the first 63 bytes are used
    double timeout_seconds = 600;  // > 0
    int exit_code = 1;             // of a process that the watchdog ends
    // Both are called on the watchdog's thread: what they use must live longer than the Watchdog.
    // `check` is called with each heartbeat, throws when something has failed behind the main
    // thread's back, and must not wait. `on_failure` aborts the communicators; it is given the line
    // that rank 0 has printed.
    std::function<void()> check = {};
    std::function<void(const char* line)> on_failure = {};
};

class Watchdog {
  public:
    /// Rank 0's port: the other ranks may connect from now on. On other ranks, and in a world of
    /// one, nothing.
    class Listener {
      public:
        /// Throws Error when no port can be opened.
        Listener(int rank, int size);
        Listener(Listener&& other) noexcept;
        ~Listener();
        /// What the other ranks need to find the port and to be let in. It is secret: for MPI to
        /// carry, not for command lines or output. "<port> <64 hexadecimal digits> <address> …",
        /// the host's addresses, IPv4 and IPv6, loopback last; empty where there is no port.
        const std::string& invitation() const { return invitation_; }

      private:
        friend class Watchdog;
        int fd_ = -1;
        std::string invitation_;
    };

    /// Starts the thread; no thread in a world of one. `listener` is this rank's, `invitation` the
    /// one of rank 0's listener; `activity` must live longer than the object. Other ranks than 0
    /// return when they are connected, and throw Error when rank 0 has let them in at none of its
    /// addresses within a minute, or timeout_seconds if that is less.
    Watchdog(Listener listener, const std::string& invitation, const Activity& activity,
             WatchdogOptions options);

    /// A good end: says goodbye, and this rank is no longer watched. Rank 0 first waits for the
    /// others' goodbyes, for timeout_seconds at most, and continues to watch them meanwhile; those
    /// it leaves behind are watched by nobody. Where an exception is the reason, it is no good end,
    /// and is reported. After report() it only ends the thread.
    ~Watchdog();

    /// This rank fails: rank 0 prints "rank 3 (host nodeA) failed: message" and all ranks end.
    /// Returns true when that is done, or when a line says what failed before and so caused this;
    /// false when the caller has to print the message, in a world of one for example. Waits five
    /// seconds at most. The caller then destroys the object and ends the process with an error,
    /// else the watchdog ends it.
    bool report(const std::string& message);

  private:
    std::unique_ptr<watchdog::Watch> watch_;
    int exceptions_;
};

}  // namespace train_gpt
