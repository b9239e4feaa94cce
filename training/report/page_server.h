// Pages for browsers: a small HTTP/1.1 server that answers GET and nothing else.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "parallel/net/socket.h"

namespace train_gpt {

struct ServedPage {
    std::string type;  // of its content
    std::function<std::string()> make;
};

class PageServer {
  public:
    /// Listens on a port (0: the kernel chooses it) of a numeric address of this host. Throws Error
    /// with the reason if it cannot. pages: by path, "/".
    PageServer(const std::string& address, int port, std::map<std::string, ServedPage> pages);

    int port() const { return net::port_of(listener_); }
    /// "http://127.0.0.1:8080/"; `host`, this host's name, stands for all of its addresses.
    std::string url(const std::string& host) const;
    /// Where this host reaches the server: "127.0.0.1:8080", "[::1]:8080".
    std::string place() const;

    /// Answers requests until stop() is true, which is asked several times a second. A page whose
    /// make() throws is answered with the message. Connections that send no whole request within
    /// seconds are closed, and so are those that take nothing of an answer for seconds; others are
    /// answered meanwhile.
    void serve(const std::function<bool()>& stop);

  private:
    struct Visit {
        net::Socket connection;
        net::Time deadline;
        std::string head = {}, answer = {};  // what has been read, and what is sent
        size_t sent = 0;                     // bytes of the answer
    };
    /// Reads or sends what is possible without waiting. Returns whether the visit continues.
    bool continues(Visit& visit) const;
    /// The whole response to a request's head.
    std::string response_to(std::string_view head) const;
    bool is_everywhere() const;
    bool is_own_host(std::string_view host) const;

    std::string address_;
    std::map<std::string, ServedPage> pages_;
    net::Socket listener_;
};

}  // namespace train_gpt
