#include "parallel/watchdog.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <span>
#include <sstream>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Duration = Clock::duration;
using namespace std::chrono_literals;

// How long things may take. The sum of what happens after a failure stays below last_resort.
constexpr Duration introduction = 2s;  // of a new connection, until it has shown the secret
constexpr Duration settling =
    300ms;  // a rank that died shows by then, when its neighbours' collectives failed
constexpr Duration answer = 3s;    // rank 0's, to a rank that reports
constexpr Duration farewell = 2s;  // until the other side has read all and closed its end
constexpr Duration grace =
    500ms;  // in which a main thread that knows of the failure may end the process itself
constexpr unsigned last_resort = 5;  // seconds to SIGALRM

Duration seconds(double count) {
    return std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(std::min(count, 1e8)));
}

/// The timeout of poll() that ends just after `duration`.
int milliseconds(Duration duration) {
    const auto count = std::chrono::ceil<std::chrono::milliseconds>(duration).count();
    return static_cast<int>(std::clamp<int64_t>(count, 0, 60000));
}

// --- texts of bounded length -----------------------------------------------------------------------------------------
// The memory may be used up when a process fails: once all ranks have come, the watchdog's thread allocates nothing.

/// A text of less than n bytes on one line; what is longer is cut off.
template <size_t n>
class Text {
  public:
    Text() = default;
    explicit Text(std::string_view text) {
        std::copy_n(text.data(), std::min(text.size(), n - 1), chars_.data());
        for (char& c : chars_)
            if ((c > 0 && c < ' ') || c == 127) c = ' ';
        for (size_t cut = unfinished_utf8(chars_.data()); cut > 0; --cut)
            chars_[std::strlen(chars_.data()) - 1] = 0;
    }
    const char* c_str() const { return chars_.data(); }
    std::span<const char, n> chars() const { return chars_; }

  private:
    std::array<char, n> chars_{};
};
using Name = Text<64>;
using Line = Text<1024>;

[[gnu::format(printf, 1, 2)]] Line line(const char* format, ...) {
    std::array<char, 1024> chars;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(chars.data(), chars.size(), format, arguments);
    va_end(arguments);
    return Line(chars.data());
}

/// Past stdio, whose lock the main thread may hold, and only if nobody has to be waited for who reads it.
void print(const Line& text) {
    std::array<char, 1100> out;
    const int length = std::snprintf(out.data(), out.size(), "train_gpt: %s\n", text.c_str());
    pollfd error_output{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&error_output, 1, 1000) != 1) return;
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, out.data(), static_cast<size_t>(length));
}

// --- messages --------------------------------------------------------------------------------------------------------
// One byte for the kind, then fields; the kind determines the length. Numbers are eight bytes, the lowest first; texts
// fill their field with zeros.

using Key = std::array<uint8_t, 16>;

enum class Kind : uint8_t {
    hello = 1,  // from a rank that connects: secret, rank, size, host
    welcome,  // rank 0's answer: the secret's other half, host. The first heartbeat after it makes the rank a member
    heartbeat,  // Progress
    failure,    // to rank 0: what it reports; from rank 0: the line that it has printed
    goodbye,
};

constexpr size_t length_of(Kind kind) {
    switch (kind) {
        case Kind::hello:
            return 1 + sizeof(Key) + 2 * 8 + sizeof(Name);
        case Kind::welcome:
            return 1 + sizeof(Key) + sizeof(Name);
        case Kind::heartbeat:
            return 1 + 3 * 8 + 2 * sizeof(Name);
        case Kind::failure:
            return 1 + sizeof(Line);
        case Kind::goodbye:
            return 1;
    }
    return 0;
}
constexpr size_t longest_message = length_of(Kind::failure);

/// A message that is written field by field.
class Message {
  public:
    explicit Message(Kind kind) : bytes_{static_cast<uint8_t>(kind)}, size_(1) {}

    Message& number(int64_t value) {
        for (int i = 0; i < 8; ++i)
            bytes_[size_++] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> 8 * i);
        return *this;
    }
    Message& key(const Key& key) { return append(key.data(), key.size()); }
    template <size_t n>
    Message& text(const Text<n>& text) {
        return append(text.chars().data(), n);
    }
    std::span<const uint8_t> bytes() const { return {bytes_.data(), size_}; }

  private:
    Message& append(const void* data, size_t size) {
        std::memcpy(bytes_.data() + size_, data, size);
        size_ += size;
        return *this;
    }

    std::array<uint8_t, longest_message> bytes_;
    size_t size_;
};

/// The fields of a whole message that came, in their order.
class Fields {
  public:
    explicit Fields(const uint8_t* message)
        : at_(message + 1), kind_(static_cast<Kind>(*message)) {}

    Kind kind() const { return kind_; }
    int64_t number() {
        uint64_t value = 0;
        for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(*at_++) << 8 * i;
        return static_cast<int64_t>(value);
    }
    Key key() {
        Key key;
        std::copy_n(at_, key.size(), key.data());
        at_ += key.size();
        return key;
    }
    template <class T>
    T text() {
        const auto* chars = reinterpret_cast<const char*>(at_);
        at_ += sizeof(T);
        return T(std::string_view(chars, ::strnlen(chars, sizeof(T))));
    }

  private:
    const uint8_t* at_;
    Kind kind_;
};

/// Takes as long wherever the first difference is.
bool equal(const Key& a, const Key& b) {
    volatile uint8_t difference = 0;
    for (size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
    return difference == 0;
}

// --- sockets ---------------------------------------------------------------------------------------------------------

class Socket {
  public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {}
    Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Socket() {
        if (fd_ >= 0) ::close(fd_);
    }
    int fd() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int fd_ = -1;
};

/// Messages over a socket that never blocks, through buffers of fixed size.
class Connection {
  public:
    explicit Connection(Socket socket) : socket_(std::move(socket)) {
        const int on = 1;
        ::setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }

    /// Adds the socket to those that poll() waits for.
    void enlist(std::vector<pollfd>& polls) {
        slot_ = polls.size();
        polls.push_back({socket_.fd(), static_cast<short>(unsent_ ? POLLIN | POLLOUT : POLLIN), 0});
    }
    /// Sends and reads what it can after that poll(), if it is `polls` that it was enlisted in.
    void serve(const std::vector<pollfd>& polls) {
        if (slot_ >= polls.size() || polls[slot_].fd != socket_.fd()) return;
        const short events = polls[slot_].revents;
        if (events & POLLOUT) flush();
        if (events & (POLLIN | POLLHUP | POLLERR)) read();
    }

    /// True when all was sent: another heartbeat is of use.
    bool idle() const { return unsent_ == 0; }
    /// There is room for one message behind a heartbeat that is partly sent, and for a goodbye.
    void send(const Message& message) {
        const auto bytes = message.bytes();
        if (bytes.size() > out_.size() - unsent_) return;
        std::copy(bytes.begin(), bytes.end(), out_.begin() + static_cast<ptrdiff_t>(unsent_));
        unsent_ += bytes.size();
        flush();
    }
    /// No more is to be sent: the other side reads all there is, then the end.
    void finish() { ::shutdown(socket_.fd(), SHUT_WR); }

    /// The next whole message of those read; valid until the next serve(). Null when there is none.
    const uint8_t* next() {
        if (first_ == last_) return nullptr;
        const size_t length = length_of(static_cast<Kind>(in_[first_]));
        if (length == 0) ended_ = true;  // garbage: nothing that follows has a meaning
        if (length == 0 || last_ - first_ < length) return nullptr;
        return in_.data() + std::exchange(first_, first_ + length);
    }
    /// The stream has ended; what came before it is in next().
    bool ended() const { return ended_; }

  private:
    void flush() {
        size_t sent = 0;
        while (sent < unsent_) {
            const ssize_t n =
                ::send(socket_.fd(), out_.data() + sent, unsent_ - sent, MSG_NOSIGNAL);
            if (n > 0) {
                sent += static_cast<size_t>(n);
            } else if (errno != EINTR) {
                // A connection that is broken says so when it is read, behind what came before.
                if (errno != EAGAIN) sent = unsent_;
                break;
            }
        }
        std::copy(out_.begin() + static_cast<ptrdiff_t>(sent),
                  out_.begin() + static_cast<ptrdiff_t>(unsent_), out_.begin());
        unsent_ -= sent;
    }
    void read() {
        std::copy(in_.begin() + static_cast<ptrdiff_t>(first_),
                  in_.begin() + static_cast<ptrdiff_t>(last_), in_.begin());
        last_ -= std::exchange(first_, 0);
        const ssize_t n = ::recv(socket_.fd(), in_.data() + last_, in_.size() - last_, 0);
        if (n > 0)
            last_ += static_cast<size_t>(n);
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            ended_ = true;
    }

    Socket socket_;
    size_t slot_ = SIZE_MAX;
    std::array<uint8_t, 2 * longest_message> out_, in_;
    size_t unsent_ = 0, first_ = 0, last_ = 0;
    bool ended_ = false;
};

// --- the invitation --------------------------------------------------------------------------------------------------

/// This host's numeric addresses, without those that mean something on one link only; loopback last.
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
        std::array<char, NI_MAXHOST> text;
        if (::getnameinfo(at->ifa_addr, length, text.data(), text.size(), nullptr, 0,
                          NI_NUMERICHOST) == 0)
            (at->ifa_flags & IFF_LOOPBACK ? loopback : addresses).emplace_back(text.data());
    }
    addresses.insert(addresses.end(), loopback.begin(), loopback.end());
    return addresses;
}

struct Invitation {
    std::string port;
    Key client, hub;  // what a rank shows to rank 0, and what rank 0 then shows to it
    std::vector<std::string> addresses;
};

std::string text_of(const Invitation& invitation) {
    std::string text = invitation.port + ' ';
    for (const Key& key : {invitation.client, invitation.hub})
        for (uint8_t byte : key) {
            text += "0123456789abcdef"[byte >> 4];
            text += "0123456789abcdef"[byte & 15];
        }
    for (const std::string& address : invitation.addresses) text += ' ' + address;
    return text;
}

Invitation parse_invitation(const std::string& text) {
    Invitation invitation;
    std::istringstream words(text);
    std::string secret;
    words >> invitation.port >> secret;
    for (std::string address; words >> address;) invitation.addresses.push_back(address);
    if (secret.size() != 4 * sizeof(Key) ||
        secret.find_first_not_of("0123456789abcdef") != std::string::npos ||
        invitation.addresses.empty())
        throw Error(
            "the watchdog's invitation, which rank 0 sends to the other ranks, has not come as it "
            "was sent");
    for (size_t i = 0; i < 2 * sizeof(Key); ++i)
        (i < sizeof(Key) ? invitation.client : invitation.hub)[i % sizeof(Key)] =
            static_cast<uint8_t>(std::stoi(secret.substr(2 * i, 2), nullptr, 16));
    return invitation;
}

/// Listens on a port of the kernel's choice, IPv6 and IPv4 in one where the host has both.
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

/// A connection to the address until `deadline`, else an invalid socket and errno.
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

// --- what is known of a rank -----------------------------------------------------------------------------------------

struct Progress {
    int64_t pulses = 0, step = 0, collectives = 0;
    Name collective{"none"}, phase{"start"};
};

Progress progress_of(const Activity& activity) {
    return {activity.pulses.load(std::memory_order_relaxed),
            activity.step.load(std::memory_order_relaxed),
            activity.collectives.load(std::memory_order_relaxed),
            Name(activity.collective.load(std::memory_order_relaxed)),
            Name(activity.phase.load(std::memory_order_relaxed))};
}

Message heartbeat(const Progress& progress) {
    Message message(Kind::heartbeat);
    message.number(progress.pulses).number(progress.step).number(progress.collectives);
    message.text(progress.collective).text(progress.phase);
    return message;
}

struct Member {
    enum class State { expected, watched, gone };

    State state = State::expected;
    std::unique_ptr<Connection> connection;
    Name host;
    Progress progress;
    bool failed = false;  // has reported that it fails
    Time heard,
        changed;  // when it was last heard, and when its pulses last were others than before

    void update(const Progress& latest, Time now) {
        if (latest.pulses != progress.pulses) changed = now;
        progress = latest;
        heard = now;
    }
    bool watched() const { return state == State::watched; }
    void leave() {
        state = State::gone;
        connection.reset();
    }
};

Progress parse_progress(Fields fields) {
    Progress progress;
    progress.pulses = fields.number();
    progress.step = fields.number();
    progress.collectives = fields.number();
    progress.collective = fields.text<Name>();
    progress.phase = fields.text<Name>();
    return progress;
}

/// "rank 3 (host nodeA) " verdict "; its last collective was reduce-scatter number 1207, in step 88 (training)"
Line obituary(int rank, const Member& member, const Line& verdict) {
    const Progress& last = member.progress;
    const Line collective = last.collectives == 0 ? Line("it has entered no collective")
                                                  : line("its last collective was %s number %lld",
                                                         last.collective.c_str(),
                                                         static_cast<long long>(last.collectives));
    return line("rank %d (host %s) %s; %s, in step %lld (%s)", rank, member.host.c_str(),
                verdict.c_str(), collective.c_str(), static_cast<long long>(last.step),
                last.phase.c_str());
}

}  // namespace

// --- one turn of the thread, and how a process ends ------------------------------------------------------------------

/// What the thread of rank 0 and those of the other ranks have in common.
class Watchdog::Watch {
  public:
    Watch(const Activity& activity, WatchdogOptions options)
        : activity_(activity),
          options_(std::move(options)),
          timeout_(seconds(options_.timeout_seconds)),
          interval_(std::min<Duration>(1s, timeout_ / 10)),
          wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!wake_) throw Error("the watchdog cannot be woken: ", std::strerror(errno));
        now_ = real_ = next_tick_ = Clock::now();
    }
    virtual ~Watch() = default;

    void start() {
        // Signals are for the main thread.
        sigset_t all, before;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before);
        thread_ = std::thread([this] { run(); });
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    void leave() {
        {
            const std::lock_guard lock(mutex_);
            leaving_ = true;
        }
        wake();
        thread_.join();
    }
    bool report(const std::string& message) {
        std::unique_lock lock(mutex_);
        if (!reported_) report_ = Line(message);
        reported_ = true;
        wake();
        return changed_.wait_for(lock, answer + 2s, [&] { return announced_; });
    }

  protected:
    /// now_ counts the time in which this process ran.
    void advance_clock() {
        const Time real = Clock::now();
        const Duration turn = real - std::exchange(real_, real);
        now_ += turn > 2 * interval_ ? interval_ : turn;
        if (turn > timeout_) {
            pause_ = turn;
            resumed_ = now_;
        }
    }

    // One turn: enlist() the sockets, wait, receive(), and every interval tick().
    virtual void enlist(std::vector<pollfd>& polls) = 0;
    virtual void receive(const std::vector<pollfd>& polls) = 0;
    virtual void tick() = 0;
    /// This rank fails, and says so.
    virtual void reported(const Line& message) = 0;
    /// Each turn after the main thread has come to its good end, until it returns true.
    virtual bool left() = 0;
    /// Says what has failed to those who can still hear it, and waits until they have.
    virtual void tell(const Line&) {}
    virtual void await_others() {}

    enum class Cause { none, stuck, silent, reported, dead };

    /// The process will end with this line when `patience` is over, unless a stronger cause shows until then.
    void suspect(Cause cause, Duration patience, const Line& text) {
        if (cause <= cause_) return;
        cause_ = cause;
        failure_ = text;
        verdict_by_ = now_ + patience;
    }

    /// Ends the process, or the thread where the main thread ends the process itself. `found_out`: it is this rank that
    /// has to print the line.
    void fail(const Line& text, bool found_out) {
        // Should something below not come back: the kernel's own way to end a process.
        struct sigaction standard {};
        standard.sa_handler = SIG_DFL;
        ::sigaction(SIGALRM, &standard, nullptr);
        sigset_t alarms;
        ::sigemptyset(&alarms);
        ::sigaddset(&alarms, SIGALRM);
        ::pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
        ::alarm(last_resort);

        if (found_out) print(text);
        tell(text);
        {
            const std::lock_guard lock(mutex_);
            announced_ = true;
        }
        changed_.notify_all();
        try {
            if (options_.on_failure) options_.on_failure(text.c_str());
        } catch (...) {  // the process ends in any case
        }
        // The main thread may be on its way out, by an exception that it reports.
        const Time end = Clock::now() + grace;
        await_others();
        while (Clock::now() < end) {
            {
                const std::lock_guard lock(mutex_);
                if (reported_ && leaving_) break;
            }
            pollfd woken{wake_.fd(), POLLIN, 0};
            ::poll(&woken, 1, milliseconds(end - Clock::now()));
            drain_wake();
        }
        const std::lock_guard lock(mutex_);
        if (!(reported_ && leaving_)) ::_exit(options_.exit_code);
        done_ = true;
    }

    Line silence(const char* others = "") const {
        return line(
            "is hung: its process is stopped, its host frozen or the link cut; it has not been "
            "heard for %g s%s",
            options_.timeout_seconds, others);
    }

    /// How long ago, of the time in which this thread ran.
    Duration since(Time then) const { return now_ - then; }

    const Activity& activity_;
    const WatchdogOptions options_;
    const Duration timeout_, interval_;
    Time now_;
    Duration
        pause_{};  // how long this process did not run, if the others must have noticed; for one interval after it
    Time leave_by_ = Time::max();

  private:
    void run() {
        std::vector<pollfd> polls;
        while (!done_) {
            polls.clear();
            polls.push_back({wake_.fd(), POLLIN, 0});
            enlist(polls);
            const Time due = std::min({next_tick_, verdict_by_, leave_by_});
            const bool waited = ::poll(polls.data(), polls.size(), milliseconds(due - now_)) >= 0;
            advance_clock();
            drain_wake();
            if (waited) receive(polls);
            if (done_) return;
            if (now_ >= next_tick_) {
                next_tick_ = now_ + interval_;
                check();
                tick();
                if (now_ - resumed_ >= interval_) pause_ = {};
            }
            take_wishes();
        }
    }

    void take_wishes() {
        bool reports, leaves;
        {
            const std::lock_guard lock(mutex_);
            reports = reported_ && !std::exchange(heard_, reported_);
            leaves = leaving_;
        }
        if (reports) reported(report_);
        if (now_ >= verdict_by_) {
            verdict_by_ = Time::max();
            fail(failure_, true);
        } else if (cause_ == Cause::none && leaves) {
            done_ = left();
        }
    }

    void check() {
        if (!options_.check || cause_ != Cause::none) return;
        try {
            options_.check();
        } catch (const std::exception& error) {
            reported(Line(error.what()));
        } catch (...) {
            reported(Line("a check failed"));
        }
    }

    void wake() {
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
    }
    void drain_wake() {
        uint64_t count;
        [[maybe_unused]] const auto read = ::read(wake_.fd(), &count, sizeof count);
    }

    Socket wake_;
    Time real_, resumed_, next_tick_, verdict_by_ = Time::max();
    Cause cause_ = Cause::none;
    Line failure_;
    bool done_ = false, heard_ = false;
    std::thread thread_;

    std::mutex mutex_;  // held for a few instructions only
    std::condition_variable changed_;
    bool leaving_ = false, reported_ = false, announced_ = false;
    Line report_;  // the main thread's, until reported_
};

// --- rank 0 ----------------------------------------------------------------------------------------------------------

class Watchdog::Hub : public Watch {
  public:
    Hub(Socket listener, const Invitation& invitation, const Activity& activity,
        WatchdogOptions options)
        : Watch(activity, std::move(options)),
          listener_(std::move(listener)),
          invitation_(invitation),
          members_(static_cast<size_t>(options_.size)) {
        members_[0].state = Member::State::watched;
        members_[0].host = Name(options_.host);
        for (Member& member : members_) member.heard = member.changed = now_;
    }

  private:
    /// A connection that is no member's yet.
    struct Guest {
        std::unique_ptr<Connection> connection;
        Time until;
        int rank = 0;  // > 0 once it has shown the secret
        Name host;
    };

    void enlist(std::vector<pollfd>& polls) override {
        polls.reserve(2 * members_.size() + spare_guests + 2);
        listener_slot_ = polls.size();
        polls.push_back({listener_.fd(), static_cast<short>(accepting_ ? POLLIN : 0), 0});
        for (Guest& guest : guests_) guest.connection->enlist(polls);
        for (Member& member : members_)
            if (member.connection) member.connection->enlist(polls);
    }

    void receive(const std::vector<pollfd>& polls) override {
        for (size_t r = 1; r < members_.size(); ++r) {
            Member& member = members_[r];
            if (!member.connection) continue;
            member.connection->serve(polls);
            while (const uint8_t* message = member.connection->next())
                if (!obey(static_cast<int>(r), Fields(message))) break;
            if (member.connection && member.connection->ended()) {
                if (pause_ > Duration::zero())
                    suspect(Cause::dead, 0s,
                            line("rank 0 (host %s) was stopped, or its host frozen, for %.0f s, "
                                 "and the others have ended",
                                 members_[0].host.c_str(),
                                 std::chrono::duration<double>(pause_).count()));
                else if (!member.failed)  // one that has reported need not say goodbye
                    suspect(Cause::dead, 0s,
                            obituary(static_cast<int>(r), member,
                                     Line("is dead: its connection ended")));
                member.leave();
            }
        }
        if (!listener_) return;
        for (Guest& guest : guests_) admit(guest, polls);
        std::erase_if(guests_,
                      [&](const Guest& guest) { return !guest.connection || now_ >= guest.until; });
        if (polls[listener_slot_].revents & POLLIN) accept_guests();
        if (std::none_of(members_.begin(), members_.end(), [](const Member& member) {
                return member.state == Member::State::expected;
            })) {
            guests_.clear();
            listener_ = Socket();
        }
    }

    /// What a member says. False when it has left by that.
    bool obey(int rank, Fields fields) {
        Member& member = members_[static_cast<size_t>(rank)];
        switch (fields.kind()) {
            case Kind::heartbeat:
                member.update(parse_progress(fields), now_);
                return true;
            case Kind::failure:
                member.failed = true;
                suspect(Cause::reported, settling,
                        line("rank %d (host %s) failed: %s", rank, member.host.c_str(),
                             fields.text<Line>().c_str()));
                return true;
            case Kind::goodbye:
                member.leave();
                return false;
            default:
                return true;
        }
    }

    /// Lets a guest in that shows the secret, and makes it a member by its first heartbeat: an attempt that the rank
    /// has given up, for another of this host's addresses, sends none.
    void admit(Guest& guest, const std::vector<pollfd>& polls) {
        Connection& connection = *guest.connection;
        connection.serve(polls);
        while (const uint8_t* message = connection.next()) {
            Fields fields(message);
            if (guest.rank == 0 && fields.kind() == Kind::hello) {
                const bool invited = equal(fields.key(), invitation_.client);
                const int64_t rank = fields.number(), size = fields.number();
                if (!invited || size != options_.size || rank < 1 || rank >= size ||
                    !expected(rank))
                    return guest.connection.reset();
                guest.rank = static_cast<int>(rank);
                guest.host = fields.text<Name>();
                connection.send(Message(Kind::welcome).key(invitation_.hub).text(members_[0].host));
            } else if (guest.rank > 0 && fields.kind() == Kind::heartbeat && expected(guest.rank)) {
                Member& member = members_[static_cast<size_t>(guest.rank)];
                member.state = Member::State::watched;
                member.host = guest.host;
                member.changed = now_;
                member.update(parse_progress(fields), now_);
                member.connection = std::move(guest.connection);
                return;  // what else has come is read with the next heartbeat
            } else {
                return guest.connection.reset();
            }
        }
        if (connection.ended()) guest.connection.reset();
    }
    bool expected(int64_t rank) const {
        return members_[static_cast<size_t>(rank)].state == Member::State::expected;
    }

    void accept_guests() {
        const size_t most = members_.size() + spare_guests;
        for (size_t count = 0; count < most; ++count) {
            Socket socket(
                ::accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
            if (!socket) {
                // Out of descriptors, for example: until the next tick, not in a busy loop.
                if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) accepting_ = false;
                return;
            }
            if (guests_.size() >= most) {
                // The one that has kept its place longest without showing the secret goes.
                const auto stranger =
                    std::find_if(guests_.begin(), guests_.end(),
                                 [](const Guest& guest) { return guest.rank == 0; });
                if (stranger == guests_.end()) continue;
                guests_.erase(stranger);
            }
            Guest& guest = guests_.emplace_back();
            guest.connection = std::make_unique<Connection>(std::move(socket));
            guest.until = now_ + std::min(introduction, timeout_);
        }
    }

    void tick() override {
        accepting_ = true;
        const Progress progress = progress_of(activity_);
        if (members_[0].watched()) members_[0].update(progress, now_);
        const Message beat = heartbeat(progress);
        for (Member& member : members_)
            if (member.connection && member.connection->idle()) member.connection->send(beat);
        judge_silent();
        judge_stuck();
    }

    void judge_silent() {
        int silent = 0;
        for (const Member& member : members_)
            silent += member.watched() && since(member.heard) > timeout_ / 2;
        for (size_t r = 1; r < members_.size(); ++r) {
            const Member& member = members_[r];
            if (member.state == Member::State::gone || since(member.heard) <= timeout_) continue;
            const int rank = static_cast<int>(r);
            if (member.watched())
                suspect(Cause::silent, 0s,
                        obituary(rank, member, silence(silent > 1 ? ", nor have others" : "")));
            else
                suspect(Cause::silent, 0s,
                        line("rank %d has not come to rank 0 (host %s) within %g s; it has ended, "
                             "or cannot reach this "
                             "host over TCP",
                             rank, options_.host.c_str(), options_.timeout_seconds));
        }
    }

    void judge_stuck() {
        const Member* last = nullptr;  // the one that the others wait for
        for (const Member& member : members_) {
            const auto place = [](const Member& m) {
                return std::tuple(m.progress.collectives, m.progress.step, m.changed);
            };
            if (member.watched() && (!last || place(member) < place(*last))) last = &member;
        }
        if (!last) return;
        // Its progress is the others' too: they have their time from when they need not wait any more.
        for (Member& member : members_) member.changed = std::max(member.changed, last->changed);
        // Who is not heard is judged by that.
        if (since(last->changed) <= timeout_ || since(last->heard) > timeout_ / 2) return;
        const auto waiting = std::count_if(members_.begin(), members_.end(), [&](const Member& m) {
            return &m != last && m.watched() && since(m.changed) > timeout_ / 2;
        });
        suspect(Cause::stuck, 0s,
                obituary(static_cast<int>(last - members_.data()), *last,
                         line("is stuck: it has made no progress for %g s, and %d of the %d ranks "
                              "wait for it",
                              options_.timeout_seconds, static_cast<int>(waiting), options_.size)));
    }

    void reported(const Line& message) override {
        suspect(Cause::reported, settling,
                line("rank 0 (host %s) failed: %s", members_[0].host.c_str(), message.c_str()));
    }

    bool left() override {
        members_[0].state = Member::State::gone;
        if (leave_by_ == Time::max()) leave_by_ = now_ + timeout_;
        const bool all_gone =
            std::all_of(members_.begin(), members_.end(),
                        [](const Member& member) { return member.state == Member::State::gone; });
        if (!all_gone && now_ < leave_by_) return false;
        for (Member& member : members_)
            if (member.connection) member.connection->send(Message(Kind::goodbye));
        await_others();
        return true;
    }

    void tell(const Line& text) override {
        for (Guest& guest : guests_)
            if (guest.rank > 0 && expected(guest.rank)) {
                Member& member = members_[static_cast<size_t>(guest.rank)];
                member.connection = std::move(guest.connection);
                member.heard = now_;
            }
        const Message message = Message(Kind::failure).text(text);
        for (Member& member : members_)
            if (member.connection) member.connection->send(message);
    }

    /// Reads on until the others have closed their ends: were there anything unread when this end is closed, the kernel
    /// would throw away what they have not read yet. Those who are silent are not waited for.
    void await_others() override {
        const Time end = Clock::now() + farewell;
        std::vector<pollfd> polls;
        for (;;) {
            polls.clear();
            for (Member& member : members_)
                if (member.connection && since(member.heard) < timeout_ / 2) {
                    if (member.connection->idle()) member.connection->finish();
                    member.connection->enlist(polls);
                }
            const Duration rest = end - Clock::now();
            if (polls.empty() || rest <= Duration::zero()) return;
            if (::poll(polls.data(), polls.size(), milliseconds(rest)) < 0) continue;
            for (Member& member : members_) {
                if (!member.connection) continue;
                member.connection->serve(polls);
                while (member.connection->next()) {
                }
                if (member.connection->ended()) member.leave();
            }
        }
    }

    // Connections beyond the job's own that are kept until they have shown what they are.
    static constexpr size_t spare_guests = 64;

    Socket listener_;
    const Invitation invitation_;
    std::vector<Member> members_;  // by rank
    std::vector<Guest> guests_;
    size_t listener_slot_ = 0;
    bool accepting_ = true;
};

// --- the other ranks -------------------------------------------------------------------------------------------------

class Watchdog::Spoke : public Watch {
  public:
    Spoke(const Invitation& invitation, const Activity& activity, WatchdogOptions options)
        : Watch(activity, std::move(options)) {
        join(invitation);
        hub_.connection->send(heartbeat(progress_of(activity_)));
        hub_.state = Member::State::watched;
        advance_clock();
        hub_.heard = hub_.changed = now_;
    }

  private:
    void join(const Invitation& invitation) {
        const Duration limit = std::min<Duration>(timeout_, 60s);
        const Time end = Clock::now() + limit;
        std::string reasons;
        // Rank 0 may be slow to answer, and an address may lead nowhere: none is given more than a few seconds at once.
        for (Duration patience = 2s; Clock::now() < end;
             patience = std::min<Duration>(2 * patience, 8s)) {
            reasons.clear();
            for (const std::string& address : invitation.addresses) {
                const Time deadline = std::min(end, Clock::now() + patience);
                Socket socket = connect_to(address, invitation.port, deadline);
                if (!socket) {
                    reasons += concat(reasons.empty() ? "" : ", ", address, " (",
                                      std::strerror(errno), ")");
                } else if (introduce(std::make_unique<Connection>(std::move(socket)), invitation,
                                     deadline)) {
                    return;
                } else {
                    reasons += concat(reasons.empty() ? "" : ", ", address, " (no answer)");
                }
            }
            std::this_thread::sleep_for(100ms);
        }
        throw Error(
            "rank ", options_.rank, " (host ", options_.host, ") could not reach rank 0 within ",
            std::chrono::duration<double>(limit).count(), " s at TCP port ", invitation.port,
            " of ", reasons, "; the hosts of a job must be able to connect to one another");
    }

    bool introduce(std::unique_ptr<Connection> connection, const Invitation& invitation,
                   Time deadline) {
        connection->send(Message(Kind::hello)
                             .key(invitation.client)
                             .number(options_.rank)
                             .number(options_.size)
                             .text(Name(options_.host)));
        std::vector<pollfd> polls;
        while (!connection->ended() && Clock::now() < deadline) {
            polls.clear();
            connection->enlist(polls);
            if (::poll(polls.data(), polls.size(), milliseconds(deadline - Clock::now())) < 0)
                continue;
            connection->serve(polls);
            if (const uint8_t* message = connection->next()) {
                Fields fields(message);
                if (fields.kind() != Kind::welcome || !equal(fields.key(), invitation.hub))
                    return false;
                hub_.host = fields.text<Name>();
                hub_.connection = std::move(connection);
                return true;
            }
        }
        return false;
    }

    void enlist(std::vector<pollfd>& polls) override {
        if (hub_.connection) hub_.connection->enlist(polls);
    }

    void receive(const std::vector<pollfd>& polls) override {
        if (!hub_.connection) return;
        hub_.connection->serve(polls);
        while (const uint8_t* message = hub_.connection->next()) {
            Fields fields(message);
            if (said_goodbye_) continue;
            if (fields.kind() == Kind::heartbeat) hub_.update(parse_progress(fields), now_);
            if (fields.kind() == Kind::failure) return fail(fields.text<Line>(), false);
            if (fields.kind() == Kind::goodbye) return hub_.leave();
        }
        if (!hub_.connection->ended()) return;
        if (!said_goodbye_)
            suspect(Cause::dead, deference(),
                    obituary(0, hub_, Line("is dead: its connection ended")));
        hub_.leave();
    }

    void tick() override {
        if (!hub_.connection || said_goodbye_) return;
        if (hub_.connection->idle()) hub_.connection->send(heartbeat(progress_of(activity_)));
        if (since(hub_.heard) > timeout_)
            suspect(Cause::silent, deference(), obituary(0, hub_, silence()));
    }

    /// How long this rank leaves it to lower ones to print a line about rank 0.
    Duration deference() const {
        return options_.rank == 1 ? 0s : 1s + std::min(options_.rank - 2, 8) * Duration(250ms);
    }

    void reported(const Line& message) override {
        if (hub_.connection) hub_.connection->send(Message(Kind::failure).text(message));
        suspect(Cause::reported, hub_.connection ? answer : Duration::zero(),
                line("rank %d (host %s) failed: %s", options_.rank, options_.host.c_str(),
                     message.c_str()));
    }

    bool left() override {
        if (hub_.connection && !said_goodbye_) {
            hub_.connection->send(Message(Kind::goodbye));
            said_goodbye_ = true;
            leave_by_ = now_ + farewell;
        }
        // Rank 0 closes the connection when it has read the goodbye.
        return !hub_.connection || now_ >= leave_by_;
    }

    Member hub_;  // rank 0, as this rank knows it
    bool said_goodbye_ = false;
};

// --- the interface ---------------------------------------------------------------------------------------------------

Watchdog::Listener::Listener(int rank, int size) {
    if (rank != 0 || size < 2) return;
    Invitation invitation;
    Socket socket = open_port(invitation.port);
    for (Key* key : {&invitation.client, &invitation.hub})
        if (::getrandom(key->data(), key->size(), 0) != static_cast<ssize_t>(key->size()))
            throw Error("the kernel gives no random numbers for the watchdog: ",
                        std::strerror(errno));
    invitation.addresses = own_addresses();
    invitation_ = text_of(invitation);
    fd_ = socket.release();
}

Watchdog::Listener::Listener(Listener&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), invitation_(std::move(other.invitation_)) {}

Watchdog::Listener::~Listener() { Socket closed(fd_); }

Watchdog::Watchdog(Listener listener, const std::string& invitation, const Activity& activity,
                   WatchdogOptions options)
    : exceptions_(std::uncaught_exceptions()) {
    if (options.size < 2) return;
    if (!(options.timeout_seconds > 0))
        throw Error("the watchdog's timeout must be above 0 seconds");
    const Invitation parsed = parse_invitation(invitation);
    if (options.rank == 0)
        watch_ = std::make_unique<Hub>(Socket(std::exchange(listener.fd_, -1)), parsed, activity,
                                       std::move(options));
    else
        watch_ = std::make_unique<Spoke>(parsed, activity, std::move(options));
    watch_->start();
}

Watchdog::~Watchdog() {
    if (!watch_) return;
    if (std::uncaught_exceptions() > exceptions_) watch_->report("it ended by an exception");
    watch_->leave();
}

bool Watchdog::report(const std::string& message) { return watch_ && watch_->report(message); }

}  // namespace train_gpt
