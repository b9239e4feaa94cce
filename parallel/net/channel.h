// A connection between two processes, in clear or through TLS 1.3, over a socket that never blocks.
//
// Both ends of a TLS connection know a key (an external pre-shared key, RFC 8446 section 2.2), and
// there are no certificates: who does not know it cannot finish the handshake, whichever end it
// plays, and who relays the bytes learns and changes nothing. Each connection has keys of its own
// from an ephemeral Diffie-Hellman exchange, so that recorded bytes cannot be replayed, nor read by
// those who learn the key later. OpenSSL's libssl does all this; a build without it has no TLS.
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
/// HMAC-SHA-256 (RFC 2104) of a text; 32 bytes, which are a key for one purpose where the text names
/// the purpose. Throws Error in a build without TLS.
std::string derive_key(std::string_view secret, std::string_view purpose);

class Channel {
  public:
    Channel();
    /// In clear.
    explicit Channel(Socket socket);
    /// TLS, from the end that has called. The other end sees the identity in clear; it says which
    /// key of 32 bytes this is. Throws Error in a build without TLS, as answer() does.
    static Channel call(Socket socket, const std::string& identity, const std::string& key);
    /// TLS, from the other end. `key_of` returns the key for an identity; empty: there is none.
    using KeyOf = std::function<std::string(const std::string& identity)>;
    static Channel answer(Socket socket, KeyOf key_of);
    Channel(Channel&&) noexcept;
    Channel& operator=(Channel&&) noexcept;
    ~Channel();

    int fd() const { return socket_.fd(); }
    explicit operator bool() const { return static_cast<bool>(socket_); }

    enum class Handshake { pending, done, failed };
    /// Does what it can of the handshake now; in clear there is none. While it is pending, events()
    /// is what poll() has to wait for.
    Handshake handshake();
    short events() const;
    /// Whether the other end has refused the key, or has shown that it does not know it.
    bool is_refused() const;
    /// What the calling end has named.
    const std::string& identity() const;

    // As recv() and send(), also for errno; any thread may call them after the handshake. After
    // EAGAIN, the same bytes must be sent again.
    ssize_t read(char* bytes, size_t n);
    ssize_t write(const char* bytes, size_t n);
    /// Whether there are bytes to read that poll() does not see.
    bool has_unread() const;

    /// Leaves TLS after the handshake, at both ends: the socket goes on in clear.
    Socket release() &&;

  private:
    struct Tls;
    Socket socket_;
    std::unique_ptr<Tls> tls_;  // null: in clear
};

/// Finishes the handshake. False where it fails or the deadline passes.
bool shake_hands(Channel& channel, Time deadline);
// As for sockets.
bool send_all(Channel& channel, std::string_view bytes, Time deadline);
bool read_all(Channel& channel, std::span<char> bytes, Time deadline);

}  // namespace train_gpt::net
