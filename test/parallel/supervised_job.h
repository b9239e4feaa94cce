// Jobs under `train_gpt supervise`, on hosts of tests: names for parts of this machine, or network
// namespaces.
#pragma once
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/catch.h"
#include "test/parallel/failing_job.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt::supervised_job {

using namespace failing_job;

/// Hosts with three slots each, which a stand-in for ssh reaches. As a real one, it ends when its
/// host is cut, and the processes on the host learn of it by the end of their input.
class Hosts {
  public:
    virtual ~Hosts() = default;
    Hosts(const Hosts&) = delete;
    Hosts& operator=(const Hosts&) = delete;

    /// The beginning of the command; the hosts after the first `spares` from the end are used.
    Arguments supervise(int hosts, int spares, const Arguments& more = {}) const {
        std::string text;
        for (int i = 0; i < hosts; ++i)
            text += concat(name(i), " slots=", slots, " address=", address(i), "\n");
        write(folder_ / "hosts", text);
        return Arguments{binary(),   "supervise",
                         "--hosts",  folder_ / "hosts",
                         "--spares", std::to_string(spares),
                         "--ssh",    folder_ / "ssh",
                         "--port",   std::to_string(port_)} +
               more + Arguments{"--"};
    }

    /// Ends everything that runs on a host at once; the host does not come back.
    void kill(int host) const {
        write(folder_ / ("cut-" + name(host)), "");
        kill_processes("SUPERVISED_HOST=" + id_of(name(host)));
        kill_clients(host);
    }
    /// A host comes back.
    void mend(int host) const { fs::remove(folder_ / ("cut-" + name(host))); }

    static constexpr int slots = 3;
    static std::string name(int host) { return concat("node-", static_cast<char>('a' + host)); }

  protected:
    Hosts() : port_(static_cast<int>(random_int(20000, 30000))) {}
    virtual std::string address(int host) const = 0;

    /// enter: a command that enters the host $1.
    void write_ssh(const std::string& enter) const {
        write(folder_ / "ssh",
              concat("#!/bin/sh\nfolder='", folder_.path(), "'\n",
                     "if [ -e \"$folder/cut-$1\" ]; then\n"
                     "    echo \"ssh: connect to host $1 port 22: No route to host\" >&2\n"
                     "    exit 255\nfi\necho $1 >> \"$folder/log\"\n",
                     "env SSH_CLIENT_TO=$folder/$1 cat | setsid ", enter,
                     " env SUPERVISED_HOST=$folder/$1 sh -c \"$2\" | cat\n"));
        fs::permissions(folder_ / "ssh", fs::perms::owner_all);
    }
    /// Other tests have hosts of the same names at the same time.
    std::string id_of(const std::string& host) const { return folder_ / host; }
    void kill_clients(int host) const {
        for (const pid_t process : with_variable("SSH_CLIENT_TO=" + id_of(name(host))))
            ::kill(-::getpgid(process), SIGKILL);
    }
    static std::vector<pid_t> with_variable(const std::string& variable) {
        std::vector<pid_t> found;
        for (const auto& entry : fs::directory_iterator("/proc")) {
            const pid_t process = std::atoi(entry.path().filename().c_str());
            if (process > 0 &&
                contains('\0' + read_of_process(entry.path() / "environ"), '\0' + variable + '\0'))
                found.push_back(process);
        }
        return found;
    }
    static void kill_processes(const std::string& variable) {
        for (const pid_t process : with_variable(variable)) ::kill(process, SIGKILL);
    }

    TemporaryDirectory folder_;
    const int port_;

  public:
    std::string log() const { return read(folder_ / "log"); }
    std::string hosts_file() const { return folder_ / "hosts"; }
};

/// Hosts that are only names: all are this machine.
class NamedHosts : public Hosts {
  public:
    NamedHosts() { write_ssh(""); }

  private:
    std::string address(int) const override { return "127.0.0.1"; }
};

/// Hosts in network, UTS and mount namespaces with a cable each to a switch, which has a namespace
/// of its own. They have memory of their own for ranks to share.
class NetworkHosts : public Hosts {
  public:
    explicit NetworkHosts(int n) {
        hold("switch");
        for (int i = 0; i < n; ++i) hold(name(i).c_str());
        set_up(on(0, {"ip", "link", "add", "name", "bridge", "type", "bridge"}));
        set_up(on(0, {"ip", "link", "set", "bridge", "up"}));
        for (int i = 0; i < n && obstacle_.empty(); ++i) {
            const std::string port = concat("port", i);
            set_up({"ip", "link", "add", "name", "cable", "netns", id(i + 1), "type", "veth",
                    "peer", "name", port, "netns", id(0)});
            set_up(on(0, {"ip", "link", "set", port, "master", "bridge", "up"}));
            set_up(on(i + 1, {"ip", "address", "add", address(i) + "/24", "dev", "cable"}));
            for (const char* device : {"lo", "cable"})
                set_up(on(i + 1, {"ip", "link", "set", device, "up"}));
        }
        if (!obstacle_.empty()) return;
        std::string cases;
        for (int i = 0; i < n; ++i) cases += concat(name(i), ") echo ", id(i + 1), " ;; ");
        write_ssh("nsenter -t $(case $1 in " + cases + "esac) -n -u -m");
    }
    ~NetworkHosts() override {
        for (const char* host : {"node-a", "node-b", "node-c"})
            kill_processes("SUPERVISED_HOST=" + id_of(host));
        for (const pid_t holder : holders_) {
            ::kill(holder, SIGKILL);
            ::waitpid(holder, nullptr, 0);
        }
    }

    /// Whether namespaces cannot be used here; prints that.
    bool skip() const {
        if (!obstacle_.empty()) std::printf("skipped: hosts, since %s\n", obstacle_.c_str());
        std::fflush(stdout);
        return !obstacle_.empty();
    }

    /// Takes the cable out of a host. Its processes live on, and ssh to it ends.
    void cut_cable(int host) const {
        write(folder_ / ("cut-" + name(host)), "");
        check_succeeds(on(0, {"ip", "link", "set", concat("port", host), "down"}));
        kill_clients(host);
    }

  private:
    std::string address(int host) const override { return concat("10.213.78.", host + 1); }
    std::string id(int at) const {
        return std::to_string(obstacle_.empty() ? holders_.at(static_cast<size_t>(at)) : 0);
    }
    Arguments on(int at, const Arguments& command) const {
        return Arguments{"nsenter", "-t", id(at), "-n", "-u"} + command;
    }
    /// A process that keeps a host's namespaces alive.
    void hold(const char* name) {
        if (!obstacle_.empty()) return;
        int ends[2];
        REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
        const pid_t holder = ::fork();
        REQUIRE(holder >= 0);
        if (holder == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            const bool done =
                ::unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) == 0 &&
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
        obstacle_ =
            concat("network namespaces are not permitted here (", std::strerror(reason), ")");
    }
    void set_up(const Arguments& command) {
        if (!obstacle_.empty()) return;
        const ProgramResult result = run_program(command);
        if (result.exit_code == 0) return;
        obstacle_ = "this failed:";
        for (const std::string& word : command) obstacle_ += " " + word;
        obstacle_ += " (" + result.output.substr(0, result.output.find('\n')) + ")";
    }

    std::vector<pid_t> holders_;  // the switch, then the hosts
    std::string obstacle_;
};

}  // namespace train_gpt::supervised_job
