#include "parallel/net/socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt::net {

namespace {

/// The numeric form of an address; empty if it has none.
std::string text_of(const sockaddr* address, socklen_t length) {
    std::array<char, NI_MAXHOST> text;
    if (::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0)
        return "";
    // How a socket for both families shows IPv4.
    constexpr std::string_view mapped = "::ffff:";
    const std::string_view all = text.data();
    const bool is_mapped = all.starts_with(mapped) && all.find('.') != std::string_view::npos;
    return std::string(is_mapped ? all.substr(mapped.size()) : all);
}

}  // namespace

int milliseconds(Duration duration) {
    const auto count = std::chrono::ceil<std::chrono::milliseconds>(duration).count();
    return static_cast<int>(std::clamp<int64_t>(count, 0, 60000));
}

bool wait_for(int fd, short events, Time deadline) {
    while (true) {
        pollfd ready{fd, events, 0};
        const Duration rest = deadline - Clock::now();
        if (::poll(&ready, 1, milliseconds(rest)) == 1) return true;
        if (rest <= Duration::zero()) return errno = ETIMEDOUT, false;
    }
}

Socket::~Socket() {
    if (fd_ >= 0) ::close(fd_);
}

Socket listen_on(int port) {
    for (const int family : {AF_INET6, AF_INET}) {
        Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!socket) continue;
        sockaddr_storage address{};
        address.ss_family = static_cast<sa_family_t>(family);
        const int off = 0, on = 1;
        if (family == AF_INET6) {
            ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
            reinterpret_cast<sockaddr_in6*>(&address)->sin6_port =
                htons(static_cast<uint16_t>(port));
        } else {
            reinterpret_cast<sockaddr_in*>(&address)->sin_port = htons(static_cast<uint16_t>(port));
        }
        // A fixed port is free again although connections of the job before linger.
        if (port > 0) ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        const socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
        if (::bind(socket.fd(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
            ::listen(socket.fd(), SOMAXCONN) == 0)
            return socket;
        if (errno == EADDRINUSE) return {};
    }
    return {};
}

int port_of(const Socket& listener) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.ss_family == AF_INET6
                     ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                     : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

Socket open_port(std::string& port, const char* purpose) {
    Socket socket = listen_on(0);
    if (!socket)
        throw Error("this rank cannot open a TCP port for ", purpose, ": ", std::strerror(errno));
    port = std::to_string(port_of(socket));
    return socket;
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

Socket accept_from(const Socket& listener) {
    return Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

void PausingListener::enlist(std::vector<pollfd>& polls) const {
    polls.push_back({is_paused() ? -1 : listener_.fd(), POLLIN, 0});
}

Socket PausingListener::admit() {
    Socket socket = accept_from(listener_);
    if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
        paused_until_ = Clock::now() + std::chrono::milliseconds(100);
    return socket;
}

void raise_descriptor_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
}

void require_descriptors(size_t needed, const std::string& who) {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
    throw Error(who, " needs ", needed,
                " open files and connections, and this host allows a process ", limit.rlim_cur,
                "; raise the hard limit there (ulimit -Hn, LimitNOFILE= of the service that starts "
                "it, or /etc/security/limits.conf)");
}

void send_at_once(const Socket& socket) {
    const int on = 1;
    ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// --- addresses -----------------------------------------------------------------------------------

std::string peer_address(const Socket& socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (::getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
    return text_of(reinterpret_cast<sockaddr*>(&address), length);
}

std::vector<std::string> own_addresses() {
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0)
        throw Error("this host's network addresses cannot be listed: ", std::strerror(errno));
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
    std::vector<std::string> addresses, loopback;
    for (const ifaddrs* at = list; at; at = at->ifa_next) {
        if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
        socklen_t length = 0;
        if (at->ifa_addr->sa_family == AF_INET) {
            length = sizeof(sockaddr_in);
            const auto* ip = reinterpret_cast<const sockaddr_in*>(at->ifa_addr);
            if (ntohl(ip->sin_addr.s_addr) >> 16 == 0xa9fe) continue;  // 169.254.0.0/16
        } else if (at->ifa_addr->sa_family == AF_INET6) {
            length = sizeof(sockaddr_in6);
            const auto* ip = reinterpret_cast<const sockaddr_in6*>(at->ifa_addr);
            if (IN6_IS_ADDR_LINKLOCAL(&ip->sin6_addr)) continue;
        } else {
            continue;
        }
        const std::string text = text_of(at->ifa_addr, length);
        if (!text.empty()) (at->ifa_flags & IFF_LOOPBACK ? loopback : addresses).push_back(text);
    }
    addresses.insert(addresses.end(), loopback.begin(), loopback.end());
    return addresses;
}

bool is_loopback(const std::string& address) {
    return address.starts_with("127.") || address == "::1";
}

std::vector<std::string> addresses_of(const std::string& host, std::string& reason) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
    if (status != 0) {
        // RFC 6761 fixes this name's addresses; images of systems may lack /etc/hosts.
        if (host == "localhost") return {"127.0.0.1", "::1"};
        reason = status == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(status);
        return {};
    }
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
    std::vector<std::string> addresses;
    for (const addrinfo* at = found; at; at = at->ai_next) {
        const std::string text = text_of(at->ai_addr, at->ai_addrlen);
        if (!text.empty() && std::ranges::find(addresses, text) == addresses.end())
            addresses.push_back(text);
    }
    if (addresses.empty()) reason = "it has no address";
    return addresses;
}

// --- bytes ---------------------------------------------------------------------------------------

bool send_all(const Socket& socket, std::string_view bytes, Time deadline) {
    while (!bytes.empty()) {
        const ssize_t n = ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (n > 0)
            bytes.remove_prefix(static_cast<size_t>(n));
        else if (errno == EAGAIN ? !wait_for(socket.fd(), POLLOUT, deadline) : errno != EINTR)
            return false;
    }
    return true;
}

bool read_all(const Socket& socket, std::span<char> bytes, Time deadline) {
    while (!bytes.empty()) {
        const ssize_t n = ::recv(socket.fd(), bytes.data(), bytes.size(), 0);
        if (n > 0)
            bytes = bytes.subspan(static_cast<size_t>(n));
        else if (n == 0)
            return errno = 0, false;
        else if (errno == EAGAIN ? !wait_for(socket.fd(), POLLIN, deadline) : errno != EINTR)
            return false;
    }
    return true;
}

void fill_random(std::span<uint8_t> bytes) {
    if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
        throw Error("the kernel gives no random numbers: ", std::strerror(errno));
}

std::string random_text(size_t bytes) {
    std::string text(bytes, '\0');
    fill_random({reinterpret_cast<uint8_t*>(text.data()), text.size()});
    return text;
}

std::string hexadecimal(std::span<const uint8_t> bytes) {
    std::string text;
    for (const uint8_t byte : bytes) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

bool equal_secrets(std::string_view a, std::string_view b) {
    if (a.size() != b.size()) return false;
    volatile uint8_t difference = 0;
    for (size_t i = 0; i < a.size(); ++i)
        difference = difference | static_cast<uint8_t>(a[i] ^ b[i]);
    return difference == 0;
}

}  // namespace train_gpt::net
