// The failure detector of a job with many ranks. A collective waits forever if one rank is missing.
// So each rank has a thread that knows whether the other ranks are alive and make progress. If one
// of them does not, the thread ends the process.
//
// Rank 0's thread listens on a TCP port, and the others connect to it. Both sides send a heartbeat
// with their Activity every min(1 s, timeout_seconds / 10). A rank has failed if it is
//
//     dead      its connection ended without a goodbye
//     hung      no message has come from it for timeout_seconds: a stopped process, a frozen host,
//               a cut link
//     stuck     its messages come, but its pulses have not changed for timeout_seconds, and it has
//               entered fewer collectives than all other ranks. If several ranks have entered the
//               fewest, the rank in the lowest step is stuck. The ranks ahead wait for this rank
//               and have not failed. A rank whose pulses change is not stuck, however long it works
//               (on a checkpoint, for example)
//     reported  it has reported its failure itself: report(), or WatchdogOptions::check
//     absent    it has not connected within timeout_seconds
//
// Rank 0 then prints one line that names rank, host and last collective, and sends the line to the
// others. The others judge rank 0 in the same way, but only as dead or hung. Rank 1 prints its line
// about rank 0 immediately. The other ranks cannot know whether rank 1 is alive. They print their
// lines one to three seconds later, when most launchers have already ended them. Then every process
// calls on_failure and ends by _exit(exit_code) within about a second. Rank 0 ends within three
// seconds, because it waits until the others have received the line. Nothing that the main thread
// does or waits for delays this. If on_failure does not return, SIGALRM ends the process after five
// seconds.
//
// Time in which a process did not run (because the job was stopped and continued) does not count.
//
// The port admits only ranks that know a random secret. All other connections are dropped after at
// most two seconds. The port is closed as soon as all ranks have joined. The connections are TLS,
// and their key follows from the secret. MPI starts the ranks of a build without TLS. There the
// connections are in clear, and nobody must intercept the network between the nodes: MPI's own
// messages need that too.
//
// hub.h is rank 0's side, spoke.h is the side of the other ranks, and watch.h is what both have in
// common. They exchange the messages of protocol.h over the sockets of connection.h.
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
    std::string host = {};  // of this rank, for messages; the first 63 bytes are used
    // The place of each rank, for messages: "data 9, tensor 1". Empty: ranks have no places.
    std::vector<std::string> places = {};
    double timeout_seconds = 600;  // > 0
    int exit_code = 1;             // of a process that the watchdog ends
    // The watchdog's thread calls these two. What they use must outlive the Watchdog. `check` is
    // called with each heartbeat. It throws if something has failed without the main thread's
    // knowledge, and must not block. `on_failure` gets the line that rank 0 has printed, and aborts
    // the communicators. If it returns false, something may block for ever that the main thread
    // could wait for, and the watchdog ends the process at once.
    std::function<void()> check = {};
    std::function<bool(const char* line)> on_failure = {};
    // Ends the process after a failure, so that the launcher learns of it; null: _exit().
    std::function<void(int exit_code)> end_process = {};
};

class Watchdog {
  public:
    /// Rank 0's port, to which the other ranks may connect as soon as the object exists. On other
    /// ranks, and in a world of one, it does nothing.
    class Listener {
      public:
        /// Throws Error if no port can be opened.
        Listener(int rank, int size);
        Listener(Listener&& other) noexcept;
        ~Listener();
        /// What the other ranks need to find the port and to be admitted: "<port> <64 hexadecimal
        /// digits> <address> …", with the host's IPv4 and IPv6 addresses, loopback last. Empty if
        /// there is no port. It is secret: send it over MPI, not in command lines or output.
        const std::string& invitation() const { return invitation_; }

      private:
        friend class Watchdog;
        int fd_ = -1;
        std::string invitation_;
    };

    /// Starts the thread; in a world of one there is no thread. `listener` belongs to this rank,
    /// `invitation` is from rank 0's listener. `activity` must outlive the object. On ranks other
    /// than 0, the constructor returns when the rank is connected. It throws Error if rank 0 does
    /// not admit the rank at any of rank 0's addresses within a minute, or within timeout_seconds
    /// if that is less.
    Watchdog(Listener listener, const std::string& invitation, const Activity& activity,
             WatchdogOptions options);

    /// A normal end: says goodbye, and this rank is no longer watched. Rank 0 first waits for the
    /// others' goodbyes, for at most timeout_seconds, and watches the others meanwhile. Ranks that
    /// still run after that are not watched. If an exception unwinds the stack, the destructor
    /// reports a failure. After report(), the destructor only ends the thread.
    ~Watchdog();

    /// Reports that this rank has failed: rank 0 prints "rank 3 (host nodeA) failed: message", and
    /// all ranks end. Waits at most five seconds. Returns true if this line has been printed, or a
    /// line about an earlier failure that has caused this one. Returns false if the caller has to
    /// print the message, in a world of one for example. The caller then destroys the object and
    /// ends the process with an error; otherwise the watchdog ends the process.
    ///
    /// If `exit_code` is not 0, this rank has not failed but is to end. The line then is "rank 3
    /// (host nodeA): message", all ranks end with this code, and the watchdog ends this rank, too.
    bool report(const std::string& message, int exit_code = 0);

  private:
    std::unique_ptr<watchdog::Watch> watch_;
    int exceptions_;
};

}  // namespace train_gpt
