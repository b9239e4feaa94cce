// Signals, in a process of their own: before a run trains, and the second one while it saves.
#include "training/interrupt.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
using namespace std::chrono_literals;

namespace {

struct End {
    int code = 0;  // minus the signal that ended it
    std::string err;
};

/// Does the work in a process of its own.
End end_of(const std::function<void()>& work) {
    const TemporaryDirectory directory;
    const std::string path = directory / "err";
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        ::dup2(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
        ::alarm(60);
        for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) std::signal(signal, SIG_DFL);
        work();
        ::_exit(0);
    }
    REQUIRE(child > 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read(path)};
}

constexpr std::pair<int, const char*> numbers[] = {
    {SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGHUP, "SIGHUP"}};
int code_of(int number) { return number == SIGINT ? 130 : 75; }

}  // namespace

TEST_CASE("a signal before anything is trained ends with the code of a run that can continue",
          "[interrupt]") {
    for (const auto& [number, name] : numbers) {
        const bool is_early = random_int(0, 1);  // before it is known whether this is a rank
        const End end = end_of([number = number, is_early] {
            end_at_signals();
            if (is_early) ::raise(number);
            act_on_signals();
            if (is_early) ::_exit(99);
            ::raise(number);
        });
        CHECK(end.code == code_of(number));
        CHECK(end.err == concat("\ntrain_gpt: ", name,
                                ": ended with nothing to save; the same command starts again\n"));
    }
    // nohup's
    CHECK(end_of([] {
              std::signal(SIGHUP, SIG_IGN);
              end_at_signals();
              act_on_signals();
              ::raise(SIGHUP);
              ::_exit(7);
          }).code == 7);
}

TEST_CASE("the innermost of those who end all ranks gets a signal, and only they", "[interrupt]") {
    for (const auto& [number, name] : numbers) {
        const int chosen = static_cast<int>(random_int(0, 3));
        const End end = end_of([number = number, chosen] {
            end_at_signals();
            const auto exits = [](int plus) {
                return [plus](int code, const std::string& line) {
                    ::dprintf(STDERR_FILENO, "%s\n", line.c_str());
                    ::_exit(code - 70 + plus);
                };
            };
            if (chosen == 3) ::raise(number);  // before there is any
            const SignalEnd outer(exits(0));
            if (chosen < 3) const SignalEnd before(exits(50));
            if (chosen == 1) {
                const SignalEnd inner(exits(1));
                ::raise(number);
                std::this_thread::sleep_for(30s);
            }
            if (chosen == 2) {
                const SignalEnd inner(exits(60));
            }
            if (chosen < 3) ::raise(number);
            std::this_thread::sleep_for(30s);
        });
        CHECK(end.code == code_of(number) - 70 + (chosen == 1 ? 1 : 0));
        CHECK(end.err ==
              concat(name, ": ended with nothing to save; the same command starts again\n"));
    }
}

TEST_CASE("a second signal says what is lost, with a code that is not that of a saved run",
          "[interrupt]") {
    const auto lost = [](int64_t saved, int64_t done, bool has_steps = true) {
        const End end = end_of([=] {
            end_at_signals();
            catch_interrupts();
            if (has_steps) set_steps(saved, done);
            const int first = numbers[random_int(0, 3)].first,
                      second = numbers[random_int(0, 3)].first;
            ::raise(first);
            if (interrupt_signal() != first) ::_exit(99);
            ::raise(second);
        });
        CHECK(end.code == 3);
        const size_t at = end.err.find("\nended at once: ");
        REQUIRE(at != std::string::npos);
        return end.err.substr(at + 16);
    };
    CHECK(lost(40, 47) == "7 steps are lost; the same command resumes from step 40\n");
    CHECK(lost(1234567, 1234568) == "1 step is lost; the same command resumes from step 1234567\n");
    CHECK(lost(0, 3) ==
          "3 steps are lost; nothing was saved, and the same command starts the run again\n");
    CHECK(lost(5, 5) ==
          "only the step that was being computed is lost; the same command resumes from step 5\n");
    CHECK(lost(0, 0, false) == "what was not saved yet is lost\n");
}
