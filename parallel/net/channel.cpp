#include "parallel/net/channel.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <mutex>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include "base/error.h"

#ifdef TRAIN_GPT_TLS
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#endif

namespace train_gpt::net {

#ifdef TRAIN_GPT_TLS

// ---- TLS ----------------------------------------------------------------------------------------

namespace {

constexpr size_t key_bytes = 32;
// Who is asked before it knows who asks reads no more than this.
constexpr size_t longest_identity = 256;

Error failure(const char* what) {
    return Error("OpenSSL's libssl ", what, "; is it damaged, or configured to forbid TLS 1.3?");
}

void check(bool done, const char* what) {
    if (!done) throw failure(what);
}

}  // namespace

bool has_tls() { return true; }

std::string derive_key(std::string_view secret, std::string_view purpose) {
    std::string key(key_bytes, '\0');
    unsigned int bytes = 0;
    check(::HMAC(::EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                 reinterpret_cast<const unsigned char*>(purpose.data()), purpose.size(),
                 reinterpret_cast<unsigned char*>(key.data()), &bytes) &&
              bytes == key.size(),
          "computes no HMAC-SHA-256");
    return key;
}

struct Channel::Tls {
    struct Free {
        void operator()(SSL* ssl) const { ::SSL_free(ssl); }
    };
    std::unique_ptr<SSL, Free> ssl;
    std::string identity, key;  // of the calling end
    KeyOf key_of;               // of the other
    bool is_done = false, is_refused = false;
    // What the socket said last.
    int fd = -1, error = 0;
    bool has_ended = false;
    short events = POLLIN;
    std::mutex mutex;  // an SSL is used by one thread at a time

    /// The result of a call to OpenSSL, in the form in which recv() and send() return theirs.
    ssize_t result_of(int n) {
        if (n > 0) return n;
        switch (::SSL_get_error(ssl.get(), n)) {
            case SSL_ERROR_WANT_READ:
                events = POLLIN;
                return errno = EAGAIN, -1;
            case SSL_ERROR_WANT_WRITE:
                events = POLLOUT;
                return errno = EAGAIN, -1;
            case SSL_ERROR_ZERO_RETURN:
                return 0;
            default:
                break;
        }
        // Reasons from here on are what the other end says.
        constexpr int first_alert = SSL_AD_REASON_OFFSET;
        const unsigned long reason = ::ERR_peek_error();
        is_refused = reason != 0 && !has_ended && error == 0 &&
                     (ERR_GET_REASON(reason) >= first_alert ||
                      ERR_GET_REASON(reason) == SSL_R_CERTIFICATE_VERIFY_FAILED);
        if (has_ended) return 0;
        return errno = error != 0 ? error : EPROTO, -1;
    }
    /// Before a call to OpenSSL.
    void begin() {
        ::ERR_clear_error();
        error = 0;
    }

    static Tls& of(SSL* ssl) { return *static_cast<Tls*>(SSL_get_app_data(ssl)); }

    // ---- What OpenSSL calls

    static int send(BIO* bio, const char* bytes, int n) {
        Tls& tls = *static_cast<Tls*>(::BIO_get_data(bio));
        ::BIO_clear_retry_flags(bio);
        const ssize_t sent = ::send(tls.fd, bytes, static_cast<size_t>(n), MSG_NOSIGNAL);
        if (sent >= 0) return static_cast<int>(sent);
        if (errno == EAGAIN || errno == EINTR)
            BIO_set_retry_write(bio);
        else
            tls.error = errno;
        return -1;
    }
    static int receive(BIO* bio, char* bytes, int n) {
        Tls& tls = *static_cast<Tls*>(::BIO_get_data(bio));
        ::BIO_clear_retry_flags(bio);
        const ssize_t received = ::recv(tls.fd, bytes, static_cast<size_t>(n), 0);
        if (received > 0) return static_cast<int>(received);
        if (received == 0)
            tls.has_ended = true;
        else if (errno == EAGAIN || errno == EINTR)
            BIO_set_retry_read(bio);
        else
            tls.error = errno;
        return -1;
    }
    static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH; }

    static SSL_SESSION* session(SSL* ssl, const std::string& key) {
        static constexpr unsigned char aes_128_gcm_sha256[] = {0x13, 0x01};
        const SSL_CIPHER* const cipher = ::SSL_CIPHER_find(ssl, aes_128_gcm_sha256);
        SSL_SESSION* const session = ::SSL_SESSION_new();
        if (session && cipher && key.size() == key_bytes &&
            ::SSL_SESSION_set1_master_key(
                session, reinterpret_cast<const unsigned char*>(key.data()), key.size()) &&
            ::SSL_SESSION_set_cipher(session, cipher) &&
            ::SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION))
            return session;
        ::SSL_SESSION_free(session);
        return nullptr;
    }
    static int use_key(SSL* ssl, const EVP_MD*, const unsigned char** identity, size_t* bytes,
                       SSL_SESSION** session) {
        const Tls& tls = of(ssl);
        *session = Tls::session(ssl, tls.key);
        *identity = reinterpret_cast<const unsigned char*>(tls.identity.data());
        *bytes = tls.identity.size();
        return *session != nullptr;
    }
    static int find_key(SSL* ssl, const unsigned char* identity, size_t bytes,
                        SSL_SESSION** session) {
        Tls& tls = of(ssl);
        *session = nullptr;
        if (bytes > longest_identity) return 1;
        tls.identity.assign(reinterpret_cast<const char*>(identity), bytes);
        // Without a session OpenSSL looks for a certificate, which there is not.
        try {
            if (const std::string key = tls.key_of(tls.identity); !key.empty())
                *session = Tls::session(ssl, key);
        } catch (const std::exception&) {
            return 0;
        }
        return 1;
    }

    static BIO_METHOD* socket_method() {
        static BIO_METHOD* const method = [] {
            BIO_METHOD* made =
                ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
            check(made && ::BIO_meth_set_write(made, send) && ::BIO_meth_set_read(made, receive) &&
                      ::BIO_meth_set_ctrl(made, control),
                  "makes no BIO");
            return made;
        }();
        return method;
    }

    static SSL_CTX* context(bool calls) {
        const auto make = [](const SSL_METHOD* method) {
            SSL_CTX* const made = ::SSL_CTX_new(method);
            check(made && ::SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION) &&
                      ::SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256") &&
                      ::SSL_CTX_set1_groups_list(made, "X25519:P-256") &&
                      ::SSL_CTX_set_num_tickets(made, 0),
                  "cannot be set up");
            ::SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
            ::SSL_CTX_set_mode(made,
                               SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
            ::SSL_CTX_clear_options(made, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
            return made;
        };
        static SSL_CTX* const caller = [&] {
            SSL_CTX* const made = make(::TLS_client_method());
            // Nobody's certificate is accepted in place of the key.
            ::SSL_CTX_set_verify(made, SSL_VERIFY_PEER, nullptr);
            ::SSL_CTX_set_psk_use_session_callback(made, use_key);
            return made;
        }();
        static SSL_CTX* const answerer = [&] {
            SSL_CTX* const made = make(::TLS_server_method());
            ::SSL_CTX_set_psk_find_session_callback(made, find_key);
            return made;
        }();
        return calls ? caller : answerer;
    }

    void start(int socket, bool calls) {
        fd = socket;
        ssl.reset(::SSL_new(context(calls)));
        BIO* const bio = ::BIO_new(socket_method());
        if (!ssl || !bio) {
            ::BIO_free(bio);
            throw failure("has no memory");
        }
        ::BIO_set_data(bio, this);
        ::BIO_set_init(bio, 1);
        ::SSL_set_bio(ssl.get(), bio, bio);
        SSL_set_app_data(ssl.get(), this);
        if (calls)
            ::SSL_set_connect_state(ssl.get());
        else
            ::SSL_set_accept_state(ssl.get());
    }
};

Channel Channel::call(Socket socket, const std::string& identity, const std::string& key) {
    Channel channel(std::move(socket));
    channel.tls_ = std::make_unique<Tls>();
    channel.tls_->identity = identity;
    channel.tls_->key = key;
    channel.tls_->start(channel.fd(), true);
    return channel;
}

Channel Channel::answer(Socket socket, KeyOf key_of) {
    Channel channel(std::move(socket));
    channel.tls_ = std::make_unique<Tls>();
    channel.tls_->key_of = std::move(key_of);
    channel.tls_->start(channel.fd(), false);
    return channel;
}

Channel::Handshake Channel::handshake() {
    if (!tls_ || tls_->is_done) return Handshake::done;
    const std::lock_guard lock(tls_->mutex);
    tls_->begin();
    const int n = ::SSL_do_handshake(tls_->ssl.get());
    if (n != 1)
        return tls_->result_of(n) < 0 && errno == EAGAIN ? Handshake::pending : Handshake::failed;
    // By the key, and not by a certificate.
    if (!::SSL_session_reused(tls_->ssl.get())) {
        tls_->is_refused = true;
        return Handshake::failed;
    }
    tls_->is_done = true;
    tls_->events = POLLIN;
    return Handshake::done;
}

ssize_t Channel::read(char* bytes, size_t n) {
    if (!tls_) return ::recv(fd(), bytes, n, 0);
    const std::lock_guard lock(tls_->mutex);
    tls_->begin();
    return tls_->result_of(
        ::SSL_read(tls_->ssl.get(), bytes, static_cast<int>(std::min<size_t>(n, 1 << 30))));
}

ssize_t Channel::write(const char* bytes, size_t n) {
    if (!tls_) return ::send(fd(), bytes, n, MSG_NOSIGNAL);
    const std::lock_guard lock(tls_->mutex);
    tls_->begin();
    const ssize_t sent = tls_->result_of(
        ::SSL_write(tls_->ssl.get(), bytes, static_cast<int>(std::min<size_t>(n, 1 << 30))));
    if (sent == 0) return errno = EPIPE, -1;
    return sent;
}

bool Channel::has_unread() const {
    if (!tls_) return false;
    const std::lock_guard lock(tls_->mutex);
    return tls_->is_done && ::SSL_pending(tls_->ssl.get()) > 0;
}

#else

namespace {

Error no_tls() {
    return Error(
        "this build has no TLS, so that its ranks start through MPI only: start them with mpirun, "
        "or install OpenSSL's libssl (libssl-dev) and rebuild");
}

}  // namespace

bool has_tls() { return false; }

std::string derive_key(std::string_view, std::string_view) { throw no_tls(); }

struct Channel::Tls {
    std::string identity;
    short events = POLLIN;
    bool is_refused = false;
};

Channel Channel::call(Socket, const std::string&, const std::string&) { throw no_tls(); }
Channel Channel::answer(Socket, KeyOf) { throw no_tls(); }
Channel::Handshake Channel::handshake() { return Handshake::done; }
ssize_t Channel::read(char* bytes, size_t n) { return ::recv(fd(), bytes, n, 0); }
ssize_t Channel::write(const char* bytes, size_t n) { return ::send(fd(), bytes, n, MSG_NOSIGNAL); }
bool Channel::has_unread() const { return false; }

#endif

// ---- Both ---------------------------------------------------------------------------------------

Channel::Channel() = default;
Channel::Channel(Socket socket) : socket_(std::move(socket)) {}
Channel::Channel(Channel&&) noexcept = default;
Channel& Channel::operator=(Channel&&) noexcept = default;
Channel::~Channel() = default;

short Channel::events() const { return tls_ ? tls_->events : POLLIN; }
bool Channel::is_refused() const { return tls_ && tls_->is_refused; }

const std::string& Channel::identity() const {
    static const std::string none;
    return tls_ ? tls_->identity : none;
}

Socket Channel::release() && {
    tls_.reset();
    return std::move(socket_);
}

bool shake_hands(Channel& channel, Time deadline) {
    while (true) {
        const Channel::Handshake state = channel.handshake();
        if (state != Channel::Handshake::pending) return state == Channel::Handshake::done;
        if (!wait_for(channel.fd(), channel.events(), deadline)) return false;
    }
}

bool send_all(Channel& channel, std::string_view bytes, Time deadline) {
    while (!bytes.empty()) {
        const ssize_t n = channel.write(bytes.data(), bytes.size());
        if (n > 0)
            bytes.remove_prefix(static_cast<size_t>(n));
        else if (errno == EAGAIN ? !wait_for(channel.fd(), POLLOUT, deadline) : errno != EINTR)
            return false;
    }
    return true;
}

bool read_all(Channel& channel, std::span<char> bytes, Time deadline) {
    while (!bytes.empty()) {
        const ssize_t n = channel.read(bytes.data(), bytes.size());
        if (n > 0)
            bytes = bytes.subspan(static_cast<size_t>(n));
        else if (n == 0)
            return errno = 0, false;
        else if (errno == EAGAIN ? !wait_for(channel.fd(), POLLIN, deadline) : errno != EINTR)
            return false;
    }
    return true;
}

}  // namespace train_gpt::net
