#include "training/report/page_server.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

namespace {

using namespace std::chrono_literals;

constexpr size_t most_head_bytes = 16384;
constexpr size_t most_visits = 64;
constexpr auto patience = 5s;

net::Socket listen_at(const std::string& address, int port) {
    sockaddr_in6 six{};
    sockaddr_in four{};
    six.sin6_family = AF_INET6, six.sin6_port = htons(static_cast<uint16_t>(port));
    four.sin_family = AF_INET, four.sin_port = six.sin6_port;
    const bool is_four = ::inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1;
    if (!is_four && ::inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) != 1)
        throw Error("--address: \"", address,
                    "\" is not a numeric address, such as 127.0.0.1, or 0.0.0.0 for all of this "
                    "host's");
    const int one = 1;
    net::Socket socket(
        ::socket(is_four ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto* const at = is_four ? reinterpret_cast<const sockaddr*>(&four)
                                   : reinterpret_cast<const sockaddr*>(&six);
    if (!socket || ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        ::bind(socket.fd(), at, is_four ? sizeof four : sizeof six) != 0 ||
        ::listen(socket.fd(), 16) != 0)
        throw Error("cannot listen on port ", port, " of ", address, ": ", std::strerror(errno),
                    "; choose another --port, or --port 0 for any");
    return socket;
}

/// The value of a header field, without spaces around it; nothing if there is none.
std::optional<std::string_view> field(std::string_view head, std::string_view name) {
    for (size_t at = head.find("\r\n"); at != head.npos; at = head.find("\r\n", at + 2)) {
        std::string_view line = head.substr(at + 2);
        line = line.substr(0, line.find("\r\n"));
        const size_t colon = line.find(':');
        if (colon != name.size() ||
            !std::equal(name.begin(), name.end(), line.begin(), [](char a, char b) {
                return std::tolower(static_cast<unsigned char>(a)) ==
                       std::tolower(static_cast<unsigned char>(b));
            }))
            continue;
        line.remove_prefix(colon + 1);
        line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
        return line.substr(0, line.find_last_not_of(" \t") + 1);
    }
    return {};
}

/// A response. The page may use what is in it and ask this server, and nothing else.
std::string response(const char* status, const std::string& type, const std::string& content,
                     const char* more = "") {
    return concat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                  "; charset=utf-8\r\nContent-Length: ", content.size(),
                  "\r\nConnection: close\r\nCache-Control: no-store\r\n"
                  "X-Content-Type-Options: nosniff\r\n"
                  "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
                  "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
                  "form-action 'none'\r\n",
                  more, "\r\n", content);
}

std::string refusal(const char* status, const char* why, const char* more = "") {
    return response(status, "text/plain", concat(why, "\n"), more);
}

}  // namespace

PageServer::PageServer(const std::string& address, int port,
                       std::map<std::string, ServedPage> pages)
    : address_(address), pages_(std::move(pages)), listener_(listen_at(address, port)) {}

bool PageServer::is_everywhere() const {
    in6_addr six{};
    in_addr four{};
    return ::inet_pton(AF_INET, address_.c_str(), &four) == 1
               ? four.s_addr == INADDR_ANY
               : ::inet_pton(AF_INET6, address_.c_str(), &six) == 1 &&
                     IN6_IS_ADDR_UNSPECIFIED(&six);
}

std::string PageServer::url(const std::string& host) const {
    return concat("http://", is_everywhere() ? concat(host, ":", port()) : place(), "/");
}

std::string PageServer::place() const {
    const bool is_six = address_.find(':') != address_.npos;
    const std::string address = is_everywhere() ? is_six ? "::1" : "127.0.0.1" : address_;
    return concat(is_six ? "[" : "", address, is_six ? "]" : "", ":", port());
}

void PageServer::serve(const std::function<bool()>& stop) {
    std::vector<Visit> visits;
    while (!stop()) {
        std::vector<pollfd> waits;
        for (const Visit& visit : visits)
            waits.push_back({.fd = visit.connection.fd(),
                             .events = visit.answer.empty() ? short{POLLIN} : short{POLLOUT},
                             .revents = 0});
        // Others wait in the kernel until there is a place.
        if (visits.size() < most_visits)
            waits.push_back({.fd = listener_.fd(), .events = POLLIN, .revents = 0});
        ::poll(waits.data(), waits.size(), 200);
        if (visits.size() < most_visits)
            if (net::Socket connection = net::accept_from(listener_))
                visits.push_back({.connection = std::move(connection),
                                  .deadline = net::Clock::now() + patience});
        for (Visit& visit : visits)
            if (!continues(visit)) visit.connection = {};
        std::erase_if(visits, [](const Visit& visit) { return !visit.connection; });
    }
}

bool PageServer::continues(Visit& visit) const {
    const int fd = visit.connection.fd();
    const auto may_come = [] { return errno == EAGAIN || errno == EINTR; };
    if (net::Clock::now() >= visit.deadline) return false;
    if (visit.answer.empty()) {
        char bytes[4096];
        const ssize_t n = ::recv(fd, bytes, sizeof bytes, 0);
        if (n <= 0) return n < 0 && may_come();
        visit.head.append(bytes, static_cast<size_t>(n));
        if (visit.head.find("\r\n\r\n") == visit.head.npos && visit.head.size() < most_head_bytes)
            return true;
        visit.answer = response_to(visit.head);
        visit.deadline = net::Clock::now() + patience;
    }
    const std::string_view rest = std::string_view(visit.answer).substr(visit.sent);
    const ssize_t n = ::send(fd, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n < 0) return may_come();
    visit.sent += static_cast<size_t>(n);
    visit.deadline = net::Clock::now() + patience;
    if (visit.sent < visit.answer.size()) return true;
    ::shutdown(fd, SHUT_WR);
    return false;
}

/// A page of another host, whose name its owner makes an address of this one, must not read this
/// server's pages: on a loopback address only loopback's names are hosts.
bool PageServer::is_own_host(std::string_view host) const {
    if (!net::is_loopback(address_)) return true;
    const size_t port = host.rfind(':');
    if (port != host.npos && host.find(']', port) == host.npos) host = host.substr(0, port);
    return host == "localhost" || host == "127.0.0.1" || host == "[::1]" || host == address_;
}

std::string PageServer::response_to(std::string_view head) const {
    const std::string_view line = head.substr(0, head.find("\r\n"));
    const size_t method = line.find(' '), path = line.find(' ', method + 1);
    const std::optional<std::string_view> host = field(head, "host");
    if (head.find("\r\n\r\n") == head.npos || method == line.npos || path == line.npos ||
        !line.substr(path + 1).starts_with("HTTP/1.") || !host)
        return refusal("400 Bad Request", "this is not a request that this server understands");
    if (!is_own_host(*host))
        return refusal("403 Forbidden", "open this page as http://localhost or http://127.0.0.1");
    if (line.substr(0, method) != "GET")
        return refusal("405 Method Not Allowed", "this server only answers GET", "Allow: GET\r\n");
    std::string_view wanted = line.substr(method + 1, path - method - 1);
    wanted = wanted.substr(0, wanted.find('?'));
    const auto page = pages_.find(std::string(wanted));
    if (page == pages_.end()) return refusal("404 Not Found", "there is no such page");
    try {
        return response("200 OK", page->second.type, page->second.make());
    } catch (const std::exception& error) {
        return refusal("500 Internal Server Error", message_of(error).c_str());
    }
}

}  // namespace train_gpt
