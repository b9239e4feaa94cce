#include "training/interrupt.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr int signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};

// A signal handler can reach nothing but globals.
std::atomic<int> received{0};
std::atomic<bool> starts{true};      // nobody knows yet whether this is one of several ranks
std::atomic<bool> remembers{false};  // catch_interrupts() was called
std::atomic<bool> ends{false}, came_while_ending{false};  // end_by_itself()
std::atomic<int> wakes{-1};                               // the eventfd of the innermost SignalEnd
std::atomic<int64_t> saved{-1}, done{-1};                 // steps; −1: the command has none
std::atomic<bool> watched_came{false};                    // a signal of a SignalWatch

const char* name_of_signal(int signal) {
    switch (signal) {
        case SIGINT:
            return "SIGINT";
        case SIGTERM:
            return "SIGTERM";
        case SIGHUP:
            return "SIGHUP";
        default:
            return "SIGUSR1";
    }
}

/// A text made in a signal handler.
class SignalText {
  public:
    SignalText& operator<<(const char* text) {
        while (*text && size_ < sizeof text_) text_[size_++] = *text++;
        return *this;
    }
    SignalText& operator<<(int64_t number) {
        char digits[20];
        size_t n = 0;
        for (; number > 0 || n == 0; number /= 10)
            digits[n++] = static_cast<char>('0' + number % 10);
        while (n > 0 && size_ < sizeof text_) text_[size_++] = digits[--n];
        return *this;
    }
    void print() const {
        [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text_, size_);
    }
    std::string text() const { return {text_, size_}; }

  private:
    char text_[300];
    size_t size_ = 0;
};

SignalText nothing_to_save(const char* before, int signal, const char* after) {
    return SignalText() << before << name_of_signal(signal)
                        << ": ended with nothing to save; the same command starts again" << after;
}

[[noreturn]] void end_alone(int signal) {
    nothing_to_save("\ntrain_gpt: ", signal, "\n").print();
    ::_exit(stopped_early_code(signal == SIGINT));
}

void wake(int fd, uint64_t count = 1) {
    [[maybe_unused]] const auto written = ::write(fd, &count, sizeof count);
}
// More than there are signals.
constexpr uint64_t leave = 1 << 16;

/// What a second signal loses.
SignalText loss() {
    SignalText text;
    text << "\nended at once: ";
    const int64_t steps = done - saved;
    if (saved < 0) return text << "what was not saved yet is lost\n";
    if (steps > 0)
        text << steps << (steps == 1 ? " step is lost" : " steps are lost");
    else
        text << "only the step that was being computed is lost";
    if (saved > 0) return text << "; the same command resumes from step " << saved.load() << "\n";
    return text << "; nothing was saved, and the same command starts the run again\n";
}

void on_signal(int signal) {
    if (ends) {
        if (came_while_ending.exchange(true)) ::_exit(stopped_early_code(signal == SIGINT));
        return;
    }
    const int saved_errno = errno;
    const bool is_second = received.exchange(signal) != 0;
    if (remembers) {
        if (is_second) {
            loss().print();
            ::_exit(ended_at_once_code);
        }
        static constexpr char text[] = "\nsaving, then ending; a second signal ends immediately\n";
        [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, sizeof text - 1);
    } else if (starts && !is_second) {
        // act_on_signals() and SignalEnd look at it
    } else if (const int fd = wakes; fd < 0 || is_second) {
        end_alone(signal);
    } else {
        wake(fd);
    }
    errno = saved_errno;
}

}  // namespace

void end_at_signals() {
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    for (const int signal : signals) {
        struct sigaction before {};
        ::sigaction(signal, nullptr, &before);
        // Ignored by whoever started the program, for example nohup: it must continue.
        if (signal == SIGHUP && before.sa_handler == SIG_IGN) continue;
        ::sigaction(signal, &action, nullptr);
    }
}

void act_on_signals() {
    starts = false;
    if (const int signal = received; signal != 0 && !remembers && wakes < 0) end_alone(signal);
}

void end_by_itself() { ends = true; }

SignalEnd::SignalEnd(End end)
    : end_(std::move(end)), wake_(::eventfd(0, EFD_CLOEXEC)), before_(wakes) {
    if (wake_ < 0) throw Error("this process cannot make an event: ", std::strerror(errno));
    sigset_t all, before;  // signals go to the main thread
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] {
        uint64_t count = 0;
        while (::read(wake_, &count, sizeof count) < 0 && errno == EINTR) {
        }
        if (count >= leave) return;
        has_ended_ = true;
        const int signal = received;
        end_(stopped_early_code(signal == SIGINT), nothing_to_save("", signal, "").text());
    });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    wakes = wake_;
    if (starts.exchange(false) && received != 0 && !remembers) wake(wake_);
}

SignalEnd::~SignalEnd() {
    wakes = before_;
    wake(wake_, leave);
    thread_.join();
    ::close(wake_);
    // One that came just now is the outer object's.
    if (const int signal = received; signal != 0 && !remembers && !has_ended_ && !ends) {
        if (before_ < 0) end_alone(signal);
        wake(before_);
    }
}

void catch_interrupts() {
    end_at_signals();
    remembers = true;
    // The run also continues when the reader of its output exits.
    std::signal(SIGPIPE, SIG_IGN);
}

void set_steps(int64_t saved_step, int64_t done_step) {
    saved = saved_step;
    done = done_step;
}

int interrupt_signal() { return received.load(); }

const char* interrupted() {
    const int signal = received;
    return signal == 0 ? nullptr : name_of_signal(signal);
}

SignalWatch::SignalWatch(std::initializer_list<int> watched) {
    watched_came = false;
    struct sigaction action {};
    action.sa_handler = [](int) { watched_came = true; };
    action.sa_flags = SA_RESTART;  // else a write to a slow terminal fails
    ::sigemptyset(&action.sa_mask);
    for (const int signal : watched) {
        struct sigaction before {};
        ::sigaction(signal, &action, &before);
        before_.emplace_back(signal, before);
    }
}

SignalWatch::~SignalWatch() {
    for (const auto& [signal, before] : before_) ::sigaction(signal, &before, nullptr);
}

bool SignalWatch::came() const { return watched_came; }

}  // namespace train_gpt
