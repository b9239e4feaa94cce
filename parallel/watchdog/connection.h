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

/// Messages over a channel, through buffers of fixed size. Messages wait until the channel's
/// handshake is done.
class Connection {
  public:
    explicit Connection(net::Channel channel);

    /// Adds the socket to the list that poll() waits for.
    void enlist(std::vector<pollfd>& polls);
    /// If the socket is in `polls`, sends and reads what is possible without waiting. Called after
    /// poll().
    void serve(const std::vector<pollfd>& polls);

    /// Whether everything has been sent, so that another heartbeat makes sense.
    bool idle() const { return unsent_ == 0; }
    /// Sends what is possible now and buffers the rest. After a partly sent heartbeat, the buffer
    /// has room for one message and a goodbye. A message that does not fit is dropped.
    void send(const Message& message);
    /// Ends sending: the other side reads everything that was sent, then the end of the stream.
    void finish();

    /// Returns the next complete message that was read; null if there is none. The pointer is valid
    /// until the next call.
    const uint8_t* next();
    /// Whether the stream has ended. next() still returns the messages before the end.
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
