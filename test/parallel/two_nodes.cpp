#include "test/parallel/two_nodes.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace train_gpt::failing_job {

TwoNodes::TwoNodes() {
    for (const char* name : {"node-a", "node-b"})
        if (obstacle_.empty()) hold(name);
    if (!obstacle_.empty()) return;
    const std::string a = std::to_string(holders_[0]), b = std::to_string(holders_[1]);
    set_up({"ip", "link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable",
            "netns", b});
    for (const size_t node : {0, 1}) {
        set_up(inside(
            node, {"ip", "address", "add", concat("10.213.77.", node + 1, "/24"), "dev", "cable"}));
        has_ipv6_ =
            run_program(inside(node, {"ip", "address", "add", concat("fd77::", node + 1, "/64"),
                                      "dev", "cable", "nodad"}))
                    .exit_code == 0 &&
            (node == 0 || has_ipv6_);
        for (const char* device : {"lo", "cable"})
            set_up(inside(node, {"ip", "link", "set", device, "up"}));
    }
    write(agent(),
          concat("#!/bin/sh\ncase $1 in node-a) node=", a, " ;; node-b) node=", b,
                 " ;; *) exit 1 ;; esac\nshift\nexec nsenter -t $node -n -u sh -c \"$*\"\n"));
    fs::permissions(agent(), fs::perms::owner_all);
}

TwoNodes::~TwoNodes() {
    for (const pid_t holder : holders_) {
        // With every other process in it, such as MPI's daemon on the far side of a cut cable.
        for (const auto& entry : fs::directory_iterator("/proc")) {
            const pid_t process = std::atoi(entry.path().filename().c_str());
            if (process > 0 && network_of(process) == network_of(holder)) ::kill(process, SIGKILL);
        }
        ::waitpid(holder, nullptr, 0);
    }
}

bool TwoNodes::skip_mpirun() const {
    if (skip()) return true;
    const bool fits = mpirun_obstacle().empty() &&
                      contains(run_program({"mpirun", "--version"}).output, "(Open MPI) 4.");
    return skip_since(fits ? "" : "mpirun is not that of Open MPI 4");
}

Arguments TwoNodes::launch(int n, bool by_ipv6) const {
    const std::string script = R"(n=$0 a=$1 b=$2 address=$3; shift 3
ranks=()
for ((r = 0; r < n; r++)); do
node=$a
((r < n / 2)) || node=$b
nsenter -t $node -n -u -m env \
    TRAIN_GPT_RANK=$r TRAIN_GPT_WORLD=$n TRAIN_GPT_ADDRESS=$address "$@" &
ranks+=($!)
done
code=0
for rank in "${ranks[@]}"; do
wait "$rank" || code=$?
done
exit $code
)";
    return {"bash",
            "-c",
            script,
            std::to_string(n),
            std::to_string(holders_[0]),
            std::to_string(holders_[1]),
            concat(by_ipv6 ? "[fd77::1]" : "10.213.77.1", ":", random_int(20000, 30000))};
}

Arguments TwoNodes::mpirun_on_both(int n) const {
    const auto set = [](const char* name, const std::string& value) {
        return Arguments{"--mca", name, value};
    };
    return inside(0, mpirun(n) + Arguments{"--host", concat("node-a:", n / 2, ",node-b:", n / 2)} +
                         set("plm", "rsh") + set("plm_rsh_agent", agent()) + set("pml", "ob1") +
                         set("btl", "tcp,vader,self") +
                         set("btl_tcp_if_include", "10.213.77.0/24") +
                         set("oob_tcp_if_include", "10.213.77.0/24"));
}

std::string TwoNodes::slow_down() const {
    const std::vector<std::pair<const char*, Arguments>> ways = {
        {"a delay of 10 ms", {"netem", "delay", "10ms"}},
        {"4 Mbit/s behind a queue", {"tbf", "rate", "4mbit", "burst", "16kb", "latency", "200ms"}}};
    for (const auto& [name, way] : ways) {
        const Arguments command = Arguments{"tc", "qdisc", "add", "dev", "cable", "root"} + way;
        if (run_program(inside(0, command)).exit_code != 0) continue;
        check_succeeds(inside(1, command));
        return name;
    }
    return "";
}

void TwoNodes::hold(const char* name) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t holder = ::fork();
    REQUIRE(holder >= 0);
    if (holder == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        const bool done = ::unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) == 0 &&
                          ::sethostname(name, std::strlen(name)) == 0 &&
                          ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                          ::mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, nullptr) == 0;
        const int reason = done ? 0 : errno;
        if (::write(ends[1], &reason, sizeof reason) != sizeof reason || !done) ::_exit(1);
        for (;;) ::pause();
    }
    ::close(ends[1]);
    int reason = ECHILD;
    if (::read(ends[0], &reason, sizeof reason) != sizeof reason) reason = ECHILD;
    ::close(ends[0]);
    if (reason == 0) {
        holders_.push_back(holder);
        return;
    }
    ::waitpid(holder, nullptr, 0);
    obstacle_ = concat("network namespaces are not permitted here (", std::strerror(reason), ")");
}

Arguments TwoNodes::inside(size_t node, const Arguments& command) const {
    return Arguments{"nsenter", "-t", std::to_string(holders_[node]), "-n", "-u"} + command;
}

void TwoNodes::set_up(const Arguments& command) {
    if (!obstacle_.empty()) return;
    const ProgramResult result = run_program(command);
    if (result.exit_code == 0) return;
    obstacle_ = "this failed:";
    for (const std::string& word : command) obstacle_ += " " + word;
    obstacle_ += " (" + result.output.substr(0, result.output.find('\n')) + ")";
}

bool TwoNodes::skip_since(const std::string& obstacle) {
    if (!obstacle.empty()) std::printf("skipped: ranks on two hosts, since %s\n", obstacle.c_str());
    std::fflush(stdout);
    return !obstacle.empty();
}

std::string TwoNodes::network_of(pid_t process) {
    std::error_code ignored;
    return fs::read_symlink(concat("/proc/", process, "/ns/net"), ignored);
}

}  // namespace train_gpt::failing_job
