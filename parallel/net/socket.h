// TCP sockets that never block, addresses, and random bytes: what the watchdog and the ranks that
// start without MPI stand on.
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <poll.h>

namespace train_gpt::net {

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

/// Listens on a port, for both IPv6 and IPv4 if the host has both; port 0: one that the kernel
/// chooses. On failure, returns an invalid socket and sets errno.
Socket listen_on(int port);
/// The port that a socket listens on.
int port_of(const Socket& listener);

/// Listens on a port that the kernel chooses, and stores it in `port`. Throws Error when no port can
/// be opened; `purpose` says what for.
Socket open_port(std::string& port, const char* purpose);

/// Connects to a numeric address and waits for that until `deadline`. On failure, returns an
/// invalid socket and sets errno.
Socket connect_to(const std::string& address, const std::string& port, Time deadline);
/// A connection that has arrived at a listener; invalid if there is none, with errno.
Socket accept_from(const Socket& listener);
/// A port at which strangers may call, too.
class Door {
  public:
    Door() = default;
    explicit Door(Socket listener) : listener_(std::move(listener)) {}
    explicit operator bool() const { return static_cast<bool>(listener_); }

    /// Adds one element to those that poll() waits for.
    void enlist(std::vector<pollfd>& polls) const;
    /// The next connection that has arrived; invalid if there is none. Where this process or host
    /// has no descriptor for it, the door rests for a moment: poll() would return at once.
    Socket admit();
    bool rests() const { return Clock::now() < rests_until_; }

  private:
    Socket listener_;
    Time rests_until_{};
};

/// Raises the limit of open files as far as this process may (from the soft limit to the hard one).
void raise_descriptor_limit();
/// Throws Error if this process cannot have so many files and connections open; `who` needs them.
void require_descriptors(size_t needed, const std::string& who);

/// Small messages leave immediately.
void send_at_once(const Socket& socket);

/// The numeric address at the other end of a connection. IPv4 addresses are written as such.
std::string peer_address(const Socket& socket);
/// This host's numeric addresses except link-local ones; loopback last. Throws Error.
std::vector<std::string> own_addresses();
bool is_loopback(const std::string& address);
/// The numeric addresses of a host name or address. If there are none, `reason` says why.
std::vector<std::string> addresses_of(const std::string& host, std::string& reason);

/// Sends all of the bytes. False if the connection ended or `deadline` passed; sets errno.
bool send_all(const Socket& socket, std::string_view bytes, Time deadline);
/// Reads bytes.size() bytes. False as send_all(); errno is 0 at the end of the stream.
bool read_all(const Socket& socket, std::span<char> bytes, Time deadline);

/// Random bytes from the kernel. Throws Error when it gives none.
void fill_random(std::span<uint8_t> bytes);
std::string random_text(size_t bytes);
/// "00ff": two digits a byte.
std::string hexadecimal(std::span<const uint8_t> bytes);
/// Compares in constant time, wherever the first difference is. Texts of different lengths differ.
bool equal_secrets(std::string_view a, std::string_view b);

}  // namespace train_gpt::net
