// A connection between two processes, in clear or through TLS 1.3, over a socket that never blocks.
//
// Both ends of a TLS connection know a key (an external pre-shared key, RFC 8446 section 2.2).
// There are no certificates. A program that does not know the key cannot finish the handshake at
// either end. A program that relays the bytes can neither read nor change them. Each connection has
// session keys of its own from an ephemeral Diffie-Hellman exchange, so recorded bytes cannot be
// replayed. Nor can somebody who learns the key later read them. OpenSSL's libssl does all this; a
// build without it has no TLS.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <sys/types.h>

#include "parallel/net/socket.h"

namespace train_gpt::net {

/// Whether this build has TLS.
bool has_tls();
/// HMAC-SHA-256 (RFC 2104) of `purpose`, with `secret` as its key: 32 bytes, which are a key for
/// this purpose. Throws Error in a build without TLS.
std::string derive_key(std::string_view secret, std::string_view purpose);

class Channel {
  public:
    Channel();
    /// A channel in clear.
    explicit Channel(Socket socket);
    /// A TLS channel at the end that has called. `key` has 32 bytes. The other end sees the
    /// identity in clear and finds the key by it. Throws Error in a build without TLS.
    static Channel call(Socket socket, const std::string& identity, const std::string& key);
    /// A TLS channel at the end that was called. `key_of` returns the key for an identity; empty:
    /// there is none. Throws Error in a build without TLS.
    using KeyOf = std::function<std::string(const std::string& identity)>;
    static Channel answer(Socket socket, KeyOf key_of);
    Channel(Channel&&) noexcept;
    Channel& operator=(Channel&&) noexcept;
    ~Channel();

    int fd() const { return socket_.fd(); }
    explicit operator bool() const { return static_cast<bool>(socket_); }

    enum class Handshake { pending, done, failed };
    /// Does what can be done of the handshake without waiting. A channel in clear has no handshake
    /// and returns `done`. While the result is `pending`, poll() must wait for events().
    Handshake handshake();
    short events() const;
    /// Whether the other end has refused the key, or has shown that it does not know the key.
    bool is_refused() const;
    /// The identity that the calling end has sent.
    const std::string& identity() const;

    // These return and set errno as recv() and send() do. Any thread may call them after the
    // handshake. After EAGAIN, the same bytes must be written again.
    ssize_t read(char* bytes, size_t n);
    ssize_t write(const char* bytes, size_t n);
    /// Whether there are bytes to read that poll() does not see.
    bool has_unread() const;

    /// Leaves TLS after the handshake and returns the socket, which continues in clear. Both ends
    /// call it.
    Socket release() &&;

  private:
    struct Tls;
    Socket socket_;
    std::unique_ptr<Tls> tls_;  // null: in clear
};

/// Finishes the handshake. Returns false if it fails or the deadline passes.
bool shake_hands(Channel& channel, Time deadline);
// Like send_all() and read_all() for sockets (socket.h).
bool send_all(Channel& channel, std::string_view bytes, Time deadline);
bool read_all(Channel& channel, std::span<char> bytes, Time deadline);

}  // namespace train_gpt::net
