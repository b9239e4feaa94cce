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

/// `duration` as a timeout for poll(), in ms: rounded up, at least 0 and at most 60000.
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

/// Listens on a port that the kernel chooses, for both IPv6 and IPv4 if the host has both. Stores
/// the port in `port`. Throws Error when no port can be opened.
Socket open_port(std::string& port);

/// Connects to a numeric address and waits for that until `deadline`. On failure, returns an
/// invalid socket and sets errno.
Socket connect_to(const std::string& address, const std::string& port, Time deadline);

/// Messages over a socket that never blocks, through buffers of fixed size.
class Connection {
  public:
    explicit Connection(Socket socket);

    /// Adds the socket to those that poll() waits for.
    void enlist(std::vector<pollfd>& polls);
    /// Sends and reads what it can after that poll(), if the socket was enlisted in `polls`.
    void serve(const std::vector<pollfd>& polls);

    /// True if everything has been sent, so that another heartbeat makes sense.
    bool idle() const { return unsent_ == 0; }
    /// Sends what it can now and buffers the rest. After a partly sent heartbeat, the buffer has
    /// room for one message and a goodbye; a message that does not fit is dropped.
    void send(const Message& message);
    /// Ends sending: the other side reads everything that was sent, then the end of the stream.
    void finish();

    /// The next complete message that was read, valid until the next serve(); null if there is
    /// none.
    const uint8_t* next();
    /// The stream has ended; next() still returns the messages before the end.
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
