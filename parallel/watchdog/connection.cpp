#include "parallel/watchdog/connection.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <sys/socket.h>

namespace train_gpt::watchdog {

Connection::Connection(Socket socket) : socket_(std::move(socket)) { net::send_at_once(socket_); }

void Connection::enlist(std::vector<pollfd>& polls) {
    slot_ = polls.size();
    polls.push_back({socket_.fd(), static_cast<short>(unsent_ ? POLLIN | POLLOUT : POLLIN), 0});
}

void Connection::serve(const std::vector<pollfd>& polls) {
    if (slot_ >= polls.size() || polls[slot_].fd != socket_.fd()) return;
    const short events = polls[slot_].revents;
    if (events & POLLOUT) flush();
    if (events & (POLLIN | POLLHUP | POLLERR)) read();
}

void Connection::send(const Message& message) {
    const auto bytes = message.bytes();
    if (bytes.size() > out_.size() - unsent_) return;
    std::copy(bytes.begin(), bytes.end(), out_.begin() + static_cast<ptrdiff_t>(unsent_));
    unsent_ += bytes.size();
    flush();
}

void Connection::finish() { ::shutdown(socket_.fd(), SHUT_WR); }

const uint8_t* Connection::next() {
    if (first_ == last_) return nullptr;
    const size_t length = length_of(static_cast<Kind>(in_[first_]));
    if (length == 0) ended_ = true;  // garbage: what follows has no meaning
    if (length == 0 || last_ - first_ < length) return nullptr;
    return in_.data() + std::exchange(first_, first_ + length);
}

void Connection::flush() {
    size_t sent = 0;
    while (sent < unsent_) {
        const ssize_t n = ::send(socket_.fd(), out_.data() + sent, unsent_ - sent, MSG_NOSIGNAL);
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
    const ssize_t n = ::recv(socket_.fd(), in_.data() + last_, in_.size() - last_, 0);
    if (n > 0)
        last_ += static_cast<size_t>(n);
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        ended_ = true;
}

}  // namespace train_gpt::watchdog
