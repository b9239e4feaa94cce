// A library whose constructor, which runs before main(), sends the process the signal EARLY_SIGNAL.
#include <csignal>
#include <cstdlib>

namespace {

const struct EarlySignal {
    EarlySignal() {
        if (const char* number = std::getenv("EARLY_SIGNAL")) std::raise(std::atoi(number));
    }
} early_signal;

}  // namespace
