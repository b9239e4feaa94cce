// The failure detector of a job with many ranks. A collective waits forever if one rank is missing.
// So each rank has a thread that knows whether the others are alive and make progress, and that
// ends the process when they do not.
//
// Rank 0's thread listens on a TCP port, and the others connect to it. Both sides send a heartbeat
// with their Activity every min(1 s, timeout_seconds / 10). A rank has failed if it is
//
//     dead      its connection ended without a goodbye
//     hung      nothing has been heard from it for timeout_seconds: a stopped process, a frozen
//               host, a cut link
//     stuck     it is heard from, but its pulses have not changed for timeout_seconds, and of all
//               ranks it has entered the fewest collectives (of several such ranks, it is in the
//               lowest step). The ranks ahead wait for it and have not failed, however long it
//               works (on a checkpoint, for example) while its pulses change
//     reported  it has reported its failure itself: report(), or WatchdogOptions::check
//     absent    it has not connected within timeout_seconds
//
// Rank 0 then prints one line that names rank, host and last collective, and sends it to the
// others. The others judge rank 0 in the same way, but only as dead or hung. Rank 1 prints its line
// immediately. The rest cannot know whether rank 1 is alive and print theirs one to three seconds
// later, when most launchers have already ended them. Then every process calls on_failure and ends
// by _exit(exit_code) within about a second (rank 0 within three: it waits until the others have
// received the line). Nothing that the main thread does or waits for delays this; if on_failure
// itself does not return, SIGALRM ends the process after five seconds.
//
// Time in which a process did not run (because the job was stopped and continued) does not count.
//
// The port admits only ranks that know a random secret, drops all other connections after at most
// two seconds, and is closed as soon as all ranks have joined. The connections are TLS whose key the
// secret is; in a build without TLS, whose ranks MPI starts, they are in clear, and like MPI's own
// messages they rely on a network between the nodes that nobody intercepts.
//
// Rank 0's side is in hub.h, that of the other ranks in spoke.h, and what both have in common in
// watch.h. They exchange the messages of protocol.h over the sockets of connection.h.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/activity.h"

namespace train_gpt {

namespace watchdog {
class Watch;
}

struct WatchdogOptions {
    int rank = 0, size = 1;
    std::string host = {};  // this rank's, for messages; the first 63 bytes are used
    // Of each rank, for messages, as "data 9, tensor 1"; empty: nothing to say.
    std::vector<std::string> places = {};
    double timeout_seconds = 600;  // > 0
    int exit_code = 1;             // of a process that the watchdog ends
    // Both are called on the watchdog's thread: what they use must outlive the Watchdog. `check` is
    // called with each heartbeat, throws if something has failed without the main thread's
    // knowledge, and must not block. `on_failure` aborts the communicators; it gets the line that
    // rank 0 has printed.
    std::function<void()> check = {};
    std::function<void(const char* line)> on_failure = {};
    // Ends the process after a failure, and tells the launcher; null: _exit().
    std::function<void(int exit_code)> end_process = {};
};

class Watchdog {
  public:
    /// Rank 0's port: from now on the other ranks may connect. On other ranks, and in a world of
    /// one, it does nothing.
    class Listener {
      public:
        /// Throws Error when no port can be opened.
        Listener(int rank, int size);
        Listener(Listener&& other) noexcept;
        ~Listener();
        /// What the other ranks need to find the port and to be admitted. It is secret: send it
        /// over MPI, not in command lines or output. "<port> <64 hexadecimal digits> <address> …"
        /// with the host's IPv4 and IPv6 addresses, loopback last; empty if there is no port.
        const std::string& invitation() const { return invitation_; }

      private:
        friend class Watchdog;
        int fd_ = -1;
        std::string invitation_;
    };

    /// Starts the thread; in a world of one there is no thread. `listener` is this rank's,
    /// `invitation` that of rank 0's listener; `activity` must outlive the object. On ranks other
    /// than 0 it returns when the rank is connected, and throws Error if rank 0 does not admit it
    /// at any of its addresses within a minute, or timeout_seconds if that is less.
    Watchdog(Listener listener, const std::string& invitation, const Activity& activity,
             WatchdogOptions options);

    /// A normal end: says goodbye, and this rank is no longer watched. Rank 0 first waits for the
    /// others' goodbyes, for at most timeout_seconds, and continues to watch them meanwhile; ranks
    /// that are still running after that are not watched. Destruction by stack unwinding is
    /// reported as a failure. After report() it only ends the thread.
    ~Watchdog();

    /// This rank has failed: rank 0 prints "rank 3 (host nodeA) failed: message" and all ranks end.
    /// Returns true once that line, or one about an earlier failure that caused this one, has been
    /// printed; false if the caller has to print the message, in a world of one for example. Waits
    /// at most five seconds. The caller then destroys the object and ends the process with an
    /// error; otherwise the watchdog ends it. Where `exit_code` is not 0, this rank has not failed
    /// but is to end: the line is "rank 3 (host nodeA): message", all ranks end with this code, and
    /// the watchdog ends this one, too.
    bool report(const std::string& message, int exit_code = 0);

  private:
    std::unique_ptr<watchdog::Watch> watch_;
    int exceptions_;
};

}  // namespace train_gpt
