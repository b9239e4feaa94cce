#include "parallel/watchdog/connection.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt::watchdog {

int milliseconds(Duration duration) {
    const auto count = std::chrono::ceil<std::chrono::milliseconds>(duration).count();
    return static_cast<int>(std::clamp<int64_t>(count, 0, 60000));
}

// --- sockets -------------------------------------------------------------------------------------

Socket::~Socket() {
    if (fd_ >= 0) ::close(fd_);
}

Socket open_port(std::string& port) {
    for (const int family : {AF_INET6, AF_INET}) {
        Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!socket) continue;
        sockaddr_storage address{};
        address.ss_family = static_cast<sa_family_t>(family);
        const int off = 0;
        if (family == AF_INET6)
            ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
        auto* const generic = reinterpret_cast<sockaddr*>(&address);
        if (::bind(socket.fd(), generic, length) != 0 || ::listen(socket.fd(), SOMAXCONN) != 0 ||
            ::getsockname(socket.fd(), generic, &length) != 0)
            continue;
        port = std::to_string(ntohs(family == AF_INET6
                                        ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(&address)->sin_port));
        return socket;
    }
    throw Error("rank 0 cannot open a TCP port for the watchdog: ", std::strerror(errno));
}

Socket connect_to(const std::string& address, const std::string& port, Time deadline) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (::getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0)
        return errno = EADDRNOTAVAIL, Socket();
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
    Socket socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) return socket;
    if (::connect(socket.fd(), found->ai_addr, found->ai_addrlen) == 0) return socket;
    if (errno != EINPROGRESS && errno != EINTR) return {};
    pollfd done{socket.fd(), POLLOUT, 0};
    int ready;
    do ready = ::poll(&done, 1, milliseconds(deadline - Clock::now()));
    while (ready < 0 && errno == EINTR);
    int error = ETIMEDOUT;
    socklen_t length = sizeof error;
    if (ready == 1) ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return errno = error, Socket();
    return socket;
}

// --- messages ------------------------------------------------------------------------------------

Connection::Connection(Socket socket) : socket_(std::move(socket)) {
    const int on = 1;
    ::setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

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
