// TCP sockets that never block, and messages over them.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <poll.h>

#include "parallel/watchdog/protocol.h"

namespace train_gpt::watchdog {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Duration = Clock::duration;

/// The timeout of poll() that ends just after `duration`.
int milliseconds(Duration duration);

/// Owns a file descriptor.
class Socket {
  public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {}
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Socket();
    int fd() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int fd_ = -1;
};

/// Listens on a port of the kernel's choice, IPv6 and IPv4 in one where the host has both. Throws
/// Error when no port can be opened.
Socket open_port(std::string& port);

/// A connection to the numeric address until `deadline`, else an invalid socket and errno.
Socket connect_to(const std::string& address, const std::string& port, Time deadline);

/// Messages over a socket that never blocks, through buffers of fixed size.
class Connection {
  public:
    explicit Connection(Socket socket);

    /// Adds the socket to those that poll() waits for.
    void enlist(std::vector<pollfd>& polls);
    /// Sends and reads what it can after that poll(), if it is `polls` that it was enlisted in.
    void serve(const std::vector<pollfd>& polls);

    /// True when all was sent: another heartbeat is of use.
    bool idle() const { return unsent_ == 0; }
    /// There is room for one message after a heartbeat that is partly sent, and for a goodbye.
    void send(const Message& message);
    /// No more is to be sent: the other side reads all there is, then the end.
    void finish();

    /// The next whole message of those read; valid until the next serve(). Null when there is none.
    const uint8_t* next();
    /// The stream has ended; what came before it is in next().
    bool ended() const { return ended_; }

  private:
    void flush();
    void read();

    Socket socket_;
    size_t slot_ = SIZE_MAX;
    std::array<uint8_t, 2 * longest_message> out_, in_;
    size_t unsent_ = 0, first_ = 0, last_ = 0;
    bool ended_ = false;
};

}  // namespace train_gpt::watchdog
