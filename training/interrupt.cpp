#include "training/interrupt.h"

#include <atomic>
#include <csignal>
#include <initializer_list>

#include <unistd.h>

namespace train_gpt {

namespace {

// A signal handler can reach nothing but a global.
std::atomic<int> received{0};
std::atomic<bool> ctrl_c{false};

void on_signal(int signal) {
    if (received.exchange(signal) != 0) ::_exit(128 + signal);
    static constexpr char text[] = "\nsaving, then ending; a second signal ends immediately\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, sizeof text - 1);
}

}  // namespace

void catch_interrupts() {
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
        struct sigaction before {};
        ::sigaction(signal, nullptr, &before);
        // Ignored by whoever started the run, for example nohup: the run must continue.
        if (signal == SIGHUP && before.sa_handler == SIG_IGN) continue;
        ::sigaction(signal, &action, nullptr);
    }
    // The run also continues when the reader of its output exits.
    std::signal(SIGPIPE, SIG_IGN);
}

int interrupt_signal() { return received.load(); }

const char* interrupted() {
    switch (received.load()) {
        case 0:
            return nullptr;
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

CtrlCWatch::CtrlCWatch() {
    ctrl_c = false;
    struct sigaction action {};
    action.sa_handler = [](int) { ctrl_c = true; };
    action.sa_flags = SA_RESTART;  // else a write to a slow terminal fails
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGINT, &action, &before_);
}

CtrlCWatch::~CtrlCWatch() { ::sigaction(SIGINT, &before_, nullptr); }

bool CtrlCWatch::pressed() const { return ctrl_c; }

}  // namespace train_gpt
