// The messages of watchdogs over a TCP socket that never blocks.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include <poll.h>

#include "parallel/net/channel.h"
#include "parallel/watchdog/protocol.h"

namespace train_gpt::watchdog {

using net::Clock, net::Duration, net::Socket, net::Time;

/// Messages over a channel, through buffers of fixed size. They wait for its handshake.
class Connection {
  public:
    explicit Connection(net::Channel channel);

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

    /// The next complete message that was read, valid until the next call; null if there is none.
    const uint8_t* next();
    /// The stream has ended; next() still returns the messages before the end.
    bool ended() const { return ended_; }

  private:
    void shake_hands();
    void flush();
    void read();

    net::Channel channel_;
    size_t slot_ = SIZE_MAX;
    std::array<uint8_t, 2 * longest_message> out_, in_;
    size_t unsent_ = 0, first_ = 0, last_ = 0;
    bool ended_ = false, is_ready_ = false;  // ready: the handshake is done
};

}  // namespace train_gpt::watchdog
