// What connections are made of: packed texts, addresses and time limits.
#include "parallel/net/socket.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <vector>

#include <sys/socket.h>

#include "parallel/net/pack.h"
#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;
using namespace std::chrono_literals;
using net::Clock, net::Socket;

namespace {

std::string bytes(int64_t n) { return net::random_text(static_cast<size_t>(n)); }

}  // namespace

TEST_CASE("packed texts are read whole, and nothing else is", "[net]") {
    for (int round = 0; round < 50; ++round) {
        std::vector<std::string> texts;
        std::vector<size_t> ends{0};  // where one may be cut
        for (int64_t n = random_int(1, 5); n > 0; --n) {
            texts.push_back(bytes(random_int(0, 30)));
            ends.push_back(ends.back() + 8 + texts.back().size());
        }
        const std::string packed = net::pack(texts);
        CHECK(net::unpack(packed) == texts);
        for (size_t size = 0; size < packed.size(); ++size) {
            const auto end = std::ranges::find(ends, size);
            const auto read = net::unpack(std::string_view(packed).substr(0, size));
            CAPTURE(size);
            REQUIRE(read.has_value() == (end != ends.end()));
            if (read) REQUIRE(std::ssize(*read) == end - ends.begin());
        }
        // A length that no memory has
        CHECK_FALSE(net::unpack(packed + net::encode(~uint64_t{0} -
                                                     static_cast<uint64_t>(random_int(0, 20))))
                        .has_value());
    }
}

TEST_CASE("secrets are equal if all of their bytes are", "[net]") {
    for (int round = 0; round < 50; ++round) {
        const std::string secret = bytes(random_int(1, 64));
        CHECK(net::equal_secrets(secret, std::string(secret)));
        for (size_t i = 0; i < secret.size(); ++i) {
            std::string other = secret;
            other[i] = static_cast<char>(other[i] ^ 1 << random_int(0, 7));
            CHECK_FALSE(net::equal_secrets(secret, other));
        }
        CHECK_FALSE(net::equal_secrets(secret, secret.substr(1)));
        CHECK_FALSE(net::equal_secrets(secret, secret + secret[0]));
    }
}

TEST_CASE("time limits for poll are whole milliseconds, and past ones are over", "[net]") {
    CHECK(net::milliseconds(0s) == 0);
    CHECK(net::milliseconds(1ns) == 1);
    CHECK(net::milliseconds(1500us) == 2);
    CHECK(net::milliseconds(std::chrono::hours(24)) == 60000);
    for (const auto past : {net::Duration(-1ns), net::Duration(-1s), net::Duration(-24h)})
        CHECK(net::milliseconds(past) == 0);
}

TEST_CASE("a connection that nobody takes is none when its time is up", "[net]") {
    // With room for one that waits; the kernel leaves others without an answer.
    Socket listener = net::listen_on(0);
    REQUIRE(::listen(listener.fd(), 0) == 0);
    const std::string port = std::to_string(net::port_of(listener));
    std::vector<Socket> made;
    for (int i = 0; i < 5; ++i) {
        errno = 0;
        Socket socket = net::connect_to("127.0.0.1", port, Clock::now() + 50ms);
        if (!socket) break;
        made.push_back(std::move(socket));
    }
    CHECK(errno == ETIMEDOUT);
    CHECK(made.size() < 5);
    // Those that were made can be used.
    for (const Socket& socket : made) CHECK(net::send_all(socket, "x", Clock::now() + 1s));
}

TEST_CASE("the address at the other end is that of its family", "[net]") {
    const Socket listener = net::listen_on(0);
    for (const std::string& address : net::own_addresses()) {
        const Socket caller =
            net::connect_to(address, std::to_string(net::port_of(listener)), Clock::now() + 10s);
        REQUIRE(caller);
        Socket taken;
        for (const auto end = Clock::now() + 10s; !taken && Clock::now() < end;)
            taken = net::accept_from(listener);
        REQUIRE(taken);
        CHECK(net::peer_address(taken) == address);
        CHECK(net::peer_address(caller) == address);
    }
}

TEST_CASE("a host's own addresses end with those that only itself can reach", "[net]") {
    const std::vector<std::string> addresses = net::own_addresses();
    REQUIRE_FALSE(addresses.empty());
    CHECK(std::ranges::is_partitioned(
        addresses, [](const std::string& address) { return !net::is_loopback(address); }));
    CHECK(net::is_loopback(addresses.back()));
    for (const char* other : {"10.0.0.1", "128.0.0.1", "::2", "12.7.0.1", "fd00::1"})
        CHECK_FALSE(net::is_loopback(other));
    for (const char* own : {"127.0.0.1", "127.1.2.3", "::1"}) CHECK(net::is_loopback(own));
}
