// Connections through TLS whose key both ends know, and what others can do to them.
#include "parallel/net/channel.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

#ifdef TRAIN_GPT_TLS
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#endif

using namespace train_gpt;
using net::Channel, net::Clock, net::Socket;
using namespace std::chrono_literals;

namespace {

bool skip_without_tls() {
    if (net::has_tls()) return false;
    std::printf("skipped: TLS, which this build does not have\n");
    return true;
}

std::pair<Socket, Socket> connected() {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    return {Socket(ends[0]), Socket(ends[1])};
}

std::string bytes(int64_t n) { return net::random_text(static_cast<size_t>(n)); }

const std::string identity = "the tests, rank 1";

Channel answerer(Socket socket, const std::string& key) {
    return Channel::answer(std::move(socket), [key](const std::string& name) {
        return name == identity ? key : std::string();
    });
}

/// Everything that has arrived at a socket.
std::string arrived(const Socket& socket) {
    std::string all(1 << 20, '\0');
    const ssize_t n = ::recv(socket.fd(), all.data(), all.size(), 0);
    all.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
    return all;
}

/// Two ends with a relay between them, which keeps what passes.
struct Relayed {
    Relayed(const std::string& caller_key, const std::string& answerer_key)
        : Relayed(connected(), connected(), caller_key, answerer_key) {}
    /// One turn. `change` gets what passes, and whether it comes from the caller.
    template <class Change>
    bool turn(Change&& change) {
        bool moved = false;
        for (const bool from_caller : {true, false}) {
            Socket &from = from_caller ? caller_side : answerer_side,
                   &to = from_caller ? answerer_side : caller_side;
            std::string passing = arrived(from);
            (from_caller ? by_caller : by_answerer) += passing;
            if (passing.empty()) continue;
            moved = true;
            change(passing, from_caller);
            net::send_all(to, passing, Clock::now() + 1s);
        }
        return moved;
    }
    bool turn() {
        return turn([](std::string&, bool) {});
    }
    /// Whether both handshakes are done.
    template <class Change>
    bool meet(Change&& change) {
        auto a = Channel::Handshake::pending, b = a;
        for (bool moved = true; moved;) {
            if (a == Channel::Handshake::pending) a = caller.handshake();
            if (b == Channel::Handshake::pending) b = answerer.handshake();
            moved = turn(change);
        }
        return a == Channel::Handshake::done && b == Channel::Handshake::done;
    }
    bool meet() {
        return meet([](std::string&, bool) {});
    }

    Socket caller_side, answerer_side;
    Channel caller, answerer;
    std::string by_caller, by_answerer;

  private:
    Relayed(std::pair<Socket, Socket> a, std::pair<Socket, Socket> b, const std::string& caller_key,
            const std::string& answerer_key)
        : caller_side(std::move(a.second)),
          answerer_side(std::move(b.second)),
          caller(Channel::call(std::move(a.first), identity, caller_key)),
          answerer(::answerer(std::move(b.first), answerer_key)) {}
};

}  // namespace

TEST_CASE("both ends of a channel read what the other one writes", "[channel]") {
    for (const bool has_tls : {false, true}) {
        if (has_tls && skip_without_tls()) continue;
        const std::string key = bytes(32);
        auto [a, b] = connected();
        Channel one = has_tls ? Channel::call(std::move(a), identity, key) : Channel(std::move(a)),
                other = has_tls ? answerer(std::move(b), key) : Channel(std::move(b));
        for (bool are_done = false; !are_done;) {
            const Channel::Handshake states[] = {one.handshake(), other.handshake()};
            for (const auto state : states) REQUIRE(state != Channel::Handshake::failed);
            are_done = states[0] == Channel::Handshake::done && states[1] == states[0];
        }
        if (has_tls) CHECK(other.identity() == identity);
        // Both at once, more than fits into buffers, in pieces of any size.
        struct Way {
            Channel &from, &to;
            std::string text, received;
            size_t sent = 0;
        } ways[] = {{one, other, bytes(random_int(1, 3 << 20)), "", 0},
                    {other, one, bytes(random_int(1, 3 << 20)), "", 0}};
        for (bool moved = true; moved;) {
            moved = false;
            for (Way& way : ways) {
                // After EAGAIN, at least the same bytes
                if (way.sent < way.text.size()) {
                    const ssize_t n =
                        way.from.write(way.text.data() + way.sent, way.text.size() - way.sent);
                    REQUIRE((n > 0 || errno == EAGAIN));
                    if (n > 0) way.sent += static_cast<size_t>(n), moved = true;
                }
                std::string piece(static_cast<size_t>(random_int(1, 100000)), '\0');
                const ssize_t n = way.to.read(piece.data(), piece.size());
                REQUIRE((n > 0 || errno == EAGAIN));
                if (n > 0) way.received.append(piece, 0, static_cast<size_t>(n)), moved = true;
            }
        }
        for (const Way& way : ways) CHECK(way.received == way.text);
        // The socket goes on in clear, from the same place on.
        const Socket x = std::move(one).release(), y = std::move(other).release();
        REQUIRE(net::send_all(x, "in clear", Clock::now() + 1s));
        CHECK(arrived(y) == "in clear");
        { const Socket closed = Socket(::dup(x.fd())); }
    }
}

TEST_CASE("the end of a channel is seen, and so is who has called it wrongly", "[channel]") {
    if (skip_without_tls()) return;
    const std::string key = bytes(32);
    auto ends = std::make_unique<Relayed>(key, key);
    REQUIRE(ends->meet());
    ends->caller = Channel();
    ends->caller_side = Socket();
    ends->answerer_side = Socket();
    char byte = 0;
    CHECK(ends->answerer.read(&byte, 1) == 0);
    for (const std::string& garbage :
         {std::string("GET / HTTP/1.1\r\n\r\n"), bytes(random_int(1, 5000)),
          std::string(5000, '\0'), std::string("\x16\x03\x01\x02", 4) + bytes(512)}) {
        auto [a, b] = connected();
        Channel answers = answerer(std::move(b), key);
        net::send_all(a, garbage, Clock::now() + 1s);
        Channel::Handshake state = answers.handshake();
        ::shutdown(a.fd(), SHUT_WR);
        if (state == Channel::Handshake::pending) state = answers.handshake();
        CHECK(state == Channel::Handshake::failed);
        CHECK(answers.identity().empty());
    }
}

TEST_CASE("who does not know the key finishes no handshake, at either end", "[channel]") {
    if (skip_without_tls()) return;
    const std::string key = bytes(32);
    std::string other = key;
    other[static_cast<size_t>(random_int(0, 31))] ^= static_cast<char>(1 << random_int(0, 7));
    for (const auto& [caller, answerer] :
         {std::pair{key, other}, {other, key}, {key, std::string()}, {bytes(32), key}}) {
        Relayed ends(caller, answerer);
        CHECK_FALSE(ends.meet());
        CHECK(ends.caller.handshake() == Channel::Handshake::failed);
        CHECK(ends.answerer.handshake() == Channel::Handshake::failed);
        CHECK(ends.caller.is_refused());
        CHECK(ends.answerer.identity() == identity);
    }
}

TEST_CASE("who relays a channel learns nothing", "[channel]") {
    if (skip_without_tls()) return;
    const std::string key = bytes(32), there = bytes(1000), back = bytes(1000);
    Relayed ends(key, key);
    REQUIRE(ends.meet());
    REQUIRE(net::send_all(ends.caller, there, Clock::now() + 1s));
    REQUIRE(net::send_all(ends.answerer, back, Clock::now() + 1s));
    ends.turn();
    std::string got(1000, '\0');
    REQUIRE(net::read_all(ends.answerer, got, Clock::now() + 1s));
    CHECK(got == there);
    REQUIRE(net::read_all(ends.caller, got, Clock::now() + 1s));
    CHECK(got == back);
    for (const std::string& seen : {ends.by_caller, ends.by_answerer}) {
        CHECK(seen.size() > 1000);
        for (const std::string& text : {key, there, back})
            for (size_t at = 0; at + 8 <= text.size(); at += 8)
                CHECK_FALSE(contains(seen, text.substr(at, 8)));
    }
}

TEST_CASE("who changes a byte of a channel ends it", "[channel]") {
    if (skip_without_tls()) return;
    for (int repeat = 0; repeat < 40; ++repeat) {
        const std::string key = bytes(32);
        Relayed whole(key, key);
        REQUIRE(whole.meet());
        const bool of_caller = random_int(0, 1);
        const size_t length = (of_caller ? whole.by_caller : whole.by_answerer).size();
        const auto changed = static_cast<size_t>(random_int(0, static_cast<int64_t>(length) - 1));
        CAPTURE(of_caller, changed, length);
        Relayed ends(key, key);
        size_t passed = 0;
        const auto change = [&](std::string& passing, bool from_caller) {
            if (from_caller != of_caller) return;
            if (changed >= passed && changed - passed < passing.size())
                passing[changed - passed] ^= static_cast<char>(1 << random_int(0, 7));
            passed += passing.size();
        };
        // The version in the header of a first record has no meaning in TLS 1.3.
        if (changed != 1 && changed != 2) CHECK_FALSE(ends.meet(change));
        // After the handshake
        std::string text = bytes(100);
        Relayed later(key, key);
        REQUIRE(later.meet());
        REQUIRE(net::send_all(later.caller, text, Clock::now() + 1s));
        later.turn([](std::string& passing, bool) {
            passing[static_cast<size_t>(random_int(5, std::ssize(passing) - 1))] ^= 1;
        });
        CHECK(later.answerer.read(text.data(), text.size()) < 0);
        CHECK(errno != EAGAIN);
    }
}

TEST_CASE("bytes of another connection are of no use: neither replayed nor sent back",
          "[channel]") {
    if (skip_without_tls()) return;
    const std::string key = bytes(32);
    Relayed recorded(key, key);
    REQUIRE(recorded.meet());
    REQUIRE(net::send_all(recorded.caller, "an order", Clock::now() + 1s));
    recorded.turn();

    auto [stranger, end] = connected();
    Channel answers = answerer(std::move(end), key);
    net::send_all(stranger, recorded.by_caller, Clock::now() + 1s);
    Channel::Handshake state = Channel::Handshake::pending;
    for (int turn = 0; turn < 3 && state == Channel::Handshake::pending; ++turn)
        state = answers.handshake();
    CHECK(state == Channel::Handshake::failed);

    auto [other, other_end] = connected();
    Channel calls = Channel::call(std::move(other_end), identity, key);
    REQUIRE(calls.handshake() == Channel::Handshake::pending);
    net::send_all(other, recorded.by_answerer, Clock::now() + 1s);
    CHECK(calls.handshake() == Channel::Handshake::failed);

    // A rank that is shown its own words.
    auto [mirror, mirrored] = connected();
    Channel self = Channel::call(std::move(mirrored), identity, key);
    REQUIRE(self.handshake() == Channel::Handshake::pending);
    net::send_all(mirror, arrived(mirror), Clock::now() + 1s);
    CHECK(self.handshake() == Channel::Handshake::failed);
}

TEST_CASE("keys for different purposes have nothing in common", "[channel]") {
    if (skip_without_tls()) return;
    const std::string key = net::derive_key("Jefe", "what do ya want for nothing?");
    CHECK(net::hexadecimal({reinterpret_cast<const uint8_t*>(key.data()), key.size()}) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");  // RFC 4231, case 2
    CHECK(net::derive_key("a", "b") != net::derive_key("a", "c"));
    CHECK(net::derive_key("a", "b") != net::derive_key("c", "b"));
}

#ifdef TRAIN_GPT_TLS

TEST_CASE("a certificate does not take the place of the key", "[channel]") {
    const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> pair(
        [] {
            EVP_PKEY* made = nullptr;
            EVP_PKEY_CTX* context = EVP_PKEY_CTX_new_id(EVP_PKEY_ED25519, nullptr);
            EVP_PKEY_keygen_init(context);
            EVP_PKEY_keygen(context, &made);
            EVP_PKEY_CTX_free(context);
            return made;
        }(),
        EVP_PKEY_free);
    REQUIRE(pair);
    const std::unique_ptr<X509, void (*)(X509*)> certificate(X509_new(), X509_free);
    X509_gmtime_adj(X509_getm_notBefore(certificate.get()), 0);
    X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 3600);
    X509_set_pubkey(certificate.get(), pair.get());
    REQUIRE(X509_sign(certificate.get(), pair.get(), nullptr) > 0);
    const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_server_method()),
                                                               SSL_CTX_free);
    REQUIRE(SSL_CTX_use_certificate(context.get(), certificate.get()) == 1);
    REQUIRE(SSL_CTX_use_PrivateKey(context.get(), pair.get()) == 1);

    auto [a, b] = connected();
    Channel caller = Channel::call(std::move(a), identity, bytes(32));
    const std::unique_ptr<SSL, void (*)(SSL*)> impostor(SSL_new(context.get()), SSL_free);
    SSL_set_fd(impostor.get(), b.fd());
    SSL_set_accept_state(impostor.get());
    Channel::Handshake state = Channel::Handshake::pending;
    for (int turn = 0; turn < 5 && state == Channel::Handshake::pending; ++turn) {
        state = caller.handshake();
        SSL_do_handshake(impostor.get());
    }
    CHECK(state == Channel::Handshake::failed);
    CHECK(caller.is_refused());
}

#endif
