#include "device/process.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include <sys/prctl.h>
#include <unistd.h>

namespace train_gpt {

namespace {

/// A process started through /proc/self/exe is named "exe"; renames it after its program.
void restore_process_name(const char* program) {
    constexpr size_t longest_name = 15;
    char name[longest_name + 1] = "";
    if (!program || ::prctl(PR_GET_NAME, name) != 0 || std::string_view(name) != "exe") return;
    ::prctl(PR_SET_NAME, std::filesystem::path(program).filename().c_str());
}

}  // namespace

void limit_openmp_spinning(char** argv) {
    restore_process_name(argv[0]);
    sigset_t ending;
    ::sigemptyset(&ending);
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) ::sigaddset(&ending, signal);
    if (!std::getenv("GOMP_SPINCOUNT") && !std::getenv("OMP_WAIT_POLICY")) {
        ::setenv("GOMP_SPINCOUNT", "1000", 1);
        // Between the two programs, signals wait: the new one has its handlers when it comes here.
        ::sigprocmask(SIG_BLOCK, &ending, nullptr);
        ::execv("/proc/self/exe", argv);  // returns only on failure
    }
    ::sigprocmask(SIG_UNBLOCK, &ending, nullptr);
}

}  // namespace train_gpt
