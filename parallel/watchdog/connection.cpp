#include "parallel/watchdog/connection.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <sys/socket.h>

namespace train_gpt::watchdog {

Connection::Connection(net::Channel channel) : channel_(std::move(channel)) { shake_hands(); }

void Connection::shake_hands() {
    if (is_ready_ || ended_) return;
    const net::Channel::Handshake state = channel_.handshake();
    is_ready_ = state == net::Channel::Handshake::done;
    ended_ = state == net::Channel::Handshake::failed;
}

void Connection::enlist(std::vector<pollfd>& polls) {
    slot_ = polls.size();
    const int events = !is_ready_ ? channel_.events() : unsent_ ? POLLIN | POLLOUT : POLLIN;
    polls.push_back({channel_.fd(), static_cast<short>(events), 0});
}

void Connection::serve(const std::vector<pollfd>& polls) {
    if (slot_ >= polls.size() || polls[slot_].fd != channel_.fd()) return;
    const short events = polls[slot_].revents;
    if (!events) return;
    if (!is_ready_) {
        shake_hands();
        if (!is_ready_) return;
        flush();
    } else if (events & POLLOUT) {
        flush();
    }
    // Also after the handshake: its last bytes may have come with the first message.
    read();
}

void Connection::send(const Message& message) {
    const auto bytes = message.bytes();
    if (bytes.size() > out_.size() - unsent_) return;
    std::copy(bytes.begin(), bytes.end(), out_.begin() + static_cast<ptrdiff_t>(unsent_));
    unsent_ += bytes.size();
    flush();
}

void Connection::finish() { ::shutdown(channel_.fd(), SHUT_WR); }

const uint8_t* Connection::next() {
    while (true) {
        if (first_ != last_) {
            const size_t length = length_of(static_cast<Kind>(in_[first_]));
            if (length == 0) ended_ = true;  // garbage: what follows has no meaning
            if (length == 0) return nullptr;
            if (last_ - first_ >= length)
                return in_.data() + std::exchange(first_, first_ + length);
        }
        if (ended_ || !channel_.has_unread()) return nullptr;
        read();
    }
}

void Connection::flush() {
    size_t sent = 0;
    while (is_ready_ && sent < unsent_) {
        const ssize_t n =
            channel_.write(reinterpret_cast<const char*>(out_.data()) + sent, unsent_ - sent);
        if (n > 0) {
            sent += static_cast<size_t>(n);
        } else if (errno != EINTR) {
            // A broken connection is noticed when reading, after the data received before.
            if (errno != EAGAIN) sent = unsent_;
            break;
        }
    }
    std::copy(out_.begin() + static_cast<ptrdiff_t>(sent),
              out_.begin() + static_cast<ptrdiff_t>(unsent_), out_.begin());
    unsent_ -= sent;
}

void Connection::read() {
    std::copy(in_.begin() + static_cast<ptrdiff_t>(first_),
              in_.begin() + static_cast<ptrdiff_t>(last_), in_.begin());
    last_ -= std::exchange(first_, 0);
    const ssize_t n =
        channel_.read(reinterpret_cast<char*>(in_.data()) + last_, in_.size() - last_);
    if (n > 0)
        last_ += static_cast<size_t>(n);
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        ended_ = true;
}

}  // namespace train_gpt::watchdog
