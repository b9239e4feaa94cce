// TCP sockets that never block, addresses, and random bytes. The watchdog uses them, and so do
// ranks that start without MPI.
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
/// Waits until a descriptor is ready for `events` of poll(). False, and errno is set, if `deadline`
/// passes first.
bool wait_for(int fd, short events, Time deadline);

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

/// Listens on a port, for both IPv6 and IPv4 if the host has both. Port 0: the kernel chooses the
/// port. On failure, returns an invalid socket and sets errno.
Socket listen_on(int port);
/// The port that a socket listens on.
int port_of(const Socket& listener);

/// Listens on a port that the kernel chooses, and stores its number in `port`. Throws Error if no
/// port can be opened; `purpose` says in the message what the port is for.
Socket open_port(std::string& port, const char* purpose);

/// Connects to a numeric address, and waits until `deadline` at most. On failure, returns an
/// invalid socket and sets errno.
Socket connect_to(const std::string& address, const std::string& port, Time deadline);
/// Returns a connection that has arrived at a listener. If there is none, returns an invalid socket
/// and sets errno.
Socket accept_from(const Socket& listener);
/// A listening port to which strangers may connect, too.
class PausingListener {
  public:
    PausingListener() = default;
    explicit PausingListener(Socket listener) : listener_(std::move(listener)) {}
    explicit operator bool() const { return static_cast<bool>(listener_); }

    /// Adds one element to the list that poll() waits for.
    void enlist(std::vector<pollfd>& polls) const;
    /// Returns the next connection that has arrived; an invalid socket if there is none. If this
    /// process or host has no descriptor left, the listener pauses for 0.1 s: poll() leaves it out,
    /// which would return at once otherwise.
    Socket admit();
    bool is_paused() const { return Clock::now() < paused_until_; }

  private:
    Socket listener_;
    Time paused_until_{};
};

/// Raises this process's soft limit of open files to the hard limit.
void raise_descriptor_limit();
/// Throws Error if this process cannot have `needed` files and connections open. `who` says in the
/// message who needs them.
void require_descriptors(size_t needed, const std::string& who);

/// Lets small messages leave immediately.
void send_at_once(const Socket& socket);

/// The numeric address at the other end of a connection. An IPv4 address is written as IPv4, also
/// if an IPv6 socket has accepted it.
std::string peer_address(const Socket& socket);
/// This host's numeric addresses, without link-local addresses, and with loopback last. Throws
/// Error if the kernel does not list them.
std::vector<std::string> own_addresses();
bool is_loopback(const std::string& address);
/// The numeric addresses of a host name or address. If there are none, `reason` says why.
std::vector<std::string> addresses_of(const std::string& host, std::string& reason);

/// Sends all of the bytes. Returns false and sets errno if the connection ended or `deadline`
/// passed.
bool send_all(const Socket& socket, std::string_view bytes, Time deadline);
/// Reads bytes.size() bytes. Returns false as send_all() does. errno is 0 at the end of the stream.
bool read_all(const Socket& socket, std::span<char> bytes, Time deadline);

/// Fills `bytes` with random bytes from the kernel. Throws Error if the kernel gives none.
void fill_random(std::span<uint8_t> bytes);
std::string random_text(size_t bytes);
/// Two digits a byte: "00ff".
std::string hexadecimal(std::span<const uint8_t> bytes);
/// Whether the texts are equal. The time does not depend on where they differ.
bool equal_secrets(std::string_view a, std::string_view b);

}  // namespace train_gpt::net
